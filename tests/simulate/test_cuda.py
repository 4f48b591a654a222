"""`torch.cuda` answers as the card would."""

from dataclasses import replace
from textwrap import dedent

import pytest
import torch

from hotloop.apps.simulate.families.attention_kernels import takes_flash

from .conftest import CARD

# What is asked, in this order in one script, and what is printed.
ASKED = {
    "memory goes up and down": (
        """
        a = torch.empty(1000, device="cuda")
        b = torch.empty(1000, device="cuda")
        print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
        del b
        print(torch.cuda.memory_allocated(), torch.cuda.memory_stats()["allocated_bytes.all.peak"])
        torch.cuda.reset_peak_memory_stats()
        print(torch.cuda.max_memory_allocated(), "simulated" in torch.cuda.memory_summary())
        """,
        ["8192 8192", "4096 8192", "4096 True"],
    ),
    "the card is the one that was named": (
        """
        p = torch.cuda.get_device_properties(0)
        print(torch.cuda.get_device_name(), p.name, p.total_memory, p.multi_processor_count, (p.major, p.minor))
        print(torch.cuda.device_count(), torch.cuda.get_device_capability("cuda:0"), torch.cuda.is_tf32_supported())
        print(torch.accelerator.current_accelerator(), torch.cuda.mem_get_info()[1])
        """,
        [f"Test GPU Test GPU {16 << 30} 100 (8, 0)", "1 (8, 0) True", f"cuda {16 << 30}"],
    ),
    "the share of memory is what was set": (
        """
        print(torch.cuda.get_per_process_memory_fraction())
        torch.cuda.set_per_process_memory_fraction(0.25, torch.device("cuda:0"))
        print(torch.cuda.memory.get_per_process_memory_fraction(0))
        try:
            torch.cuda.get_per_process_memory_fraction(torch.device("cuda"))
        except ValueError as error:
            print(error)
        """,
        ["1.0", "0.25", "Expected a torch.device with a specified index or an integer, but got:cuda"],
    ),
    "seeds and states can be kept and do not touch the host": (
        """
        torch.manual_seed(1)
        first = torch.rand(3)
        torch.manual_seed(1)
        state = torch.cuda.get_rng_state()
        torch.rand(5, device="cuda").cpu()
        torch.cuda.set_rng_state(state)
        print(torch.equal(first, torch.rand(3)), torch.cuda.initial_seed())
        """,
        ["True 1"],
    ),
    "graphs, streams, events and ranges pass through": (
        """
        x = torch.zeros(4, device="cuda")
        g, s = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(s), torch.cuda.nvtx.range("forward"):
            y = x + 1
        torch.cuda.nvtx.mark("here")
        torch.cuda.current_stream().wait_stream(s)
        with torch.cuda.graph(g):
            z = y * 2
        g.replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(); end.record(); end.synchronize()
        print(z.shape, start.elapsed_time(end) >= 0)
        """,
        ["torch.Size([4]) True"],
    ),
    "types of old make and name tensors of the device": (
        """
        a, b = torch.cuda.FloatTensor(3, 4), torch.cuda.LongTensor([1])
        print(a.shape, a.type(), b.shape, b.type(), torch.cuda.IntTensor().shape, torch.cuda.HalfTensor(a.size()).shape)
        c, d = torch.ones(2).type(torch.cuda.HalfTensor), torch.ones(2).type("torch.cuda.DoubleTensor")
        print(c.type(), d.type(), c.type(torch.float32).type(), torch.ones(2).type("torch.LongTensor").type())
        print(isinstance(a, torch.cuda.FloatTensor), isinstance(b, torch.cuda.FloatTensor))
        torch.set_default_tensor_type("torch.cuda.DoubleTensor")
        print(torch.randn(2).type())
        torch.set_default_tensor_type(torch.FloatTensor)
        print(torch.randn(2).type())
        """,
        [
            "torch.Size([3, 4]) torch.cuda.FloatTensor torch.Size([1]) torch.cuda.LongTensor torch.Size([0]) "
            "torch.Size([3, 4])",
            "torch.cuda.HalfTensor torch.cuda.DoubleTensor torch.cuda.FloatTensor torch.LongTensor",
            "True False",
            "torch.cuda.DoubleTensor",
            "torch.FloatTensor",
        ],
    ),
}


def test_it_answers_as_the_card_would(run) -> None:
    ran = run("import torch\n" + "".join(f"print({name!r})\n{dedent(code)}" for name, (code, _) in ASKED.items()))
    assert ran.out.splitlines() == [line for name, (_, lines) in ASKED.items() for line in (name, *lines)], ran.err


def test_an_old_card_has_no_bf16_of_its_own_and_no_flash_attention(run) -> None:
    card = replace(CARD, capability=(7, 5))
    ran = run(
        """
        import torch
        print(torch.cuda.is_bf16_supported(including_emulation=False))
        q = torch.randn(1, 2, 4, 8, device="cuda", dtype=torch.float16)
        print(torch.nn.functional.scaled_dot_product_attention(q, q, q).shape)
        """,
        card=card,
    )
    assert ran.out.splitlines() == ["False", "torch.Size([1, 2, 4, 8])"]


@pytest.mark.gpu
def test_properties_have_all_that_a_real_card_has(run) -> None:
    ran = run("import torch\nprint(*dir(torch.cuda.get_device_properties(0)))\n")
    real = {name for name in dir(torch.cuda.get_device_properties(0)) if not name.startswith("_")}
    assert real <= set(ran.out.split()) | {"gcnArchName", "pci_bus_id", "pci_device_id", "pci_domain_id"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_computed_by_the_operation_that_a_real_card_takes(dtype: torch.dtype, masked: bool) -> None:
    """cuDNN's operation may be taken in place of flash attention on the newest cards: both hold the same memory."""
    query = torch.randn(2, 4, 128, 64, device="cuda", dtype=dtype, requires_grad=True)
    mask = torch.ones(2, 4, 128, 128, device="cuda", dtype=torch.bool) if masked else None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    names = {event.key for event in profile.key_averages()}
    flash = not masked and takes_flash(query, torch.cuda.get_device_capability())
    wanted = ("flash", "cudnn") if flash else ("efficient", "cudnn")
    assert any(f"_scaled_dot_product_{name}_attention" in key for key in names for name in wanted), names


@pytest.mark.gpu
def test_norms_are_computed_by_the_operations_that_a_real_card_takes() -> None:
    x = torch.randn(2, 4, 8, 8, device="cuda", requires_grad=True)
    batch, rms = torch.nn.BatchNorm2d(4).cuda(), torch.nn.RMSNorm(8).cuda()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        rms(batch(x)).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"aten::cudnn_batch_norm", "aten::cudnn_batch_norm_backward", "aten::_fused_rms_norm"} <= names
