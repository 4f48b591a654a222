"""`with hotloop.simulate("h200") as sim: …`, in a process that has imported torch and used it."""

import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from hotloop import simulate
from hotloop.apps.simulate.cards import generic
from hotloop.apps.simulate.shim import CannotSimulate
from hotloop.errors import BadArgument, HotloopError


@pytest.fixture(autouse=True)
def cache(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTLOOP_CACHE", str(built.parent.parent))


def train(model: nn.Module, optimizer: Optimizer, rounds: int = 3) -> torch.Tensor:
    for _ in range(rounds):
        loss = model(torch.randn(4, 8).cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def line_of(words: str) -> int:
    (found,) = [n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.rstrip().endswith(words)]
    return found


def test_a_block_tells_what_would_happen() -> None:
    with simulate("h200") as sim:
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_name() == "NVIDIA H200"
        model = net().to("cuda")
        loss = train(model, torch.optim.Adam(model.parameters()))
        loss.item()  # waits
        model(torch.randn(4, 8))  # left on the host
    assert sim.result.completed == sim.result.steps == 3
    assert 0 < sim.peak.allocated <= sim.peak.reserved < sim.peak.process
    assert [(found.code, found.line) for found in sim.findings] == [("mixed-devices", line_of("# left on the host"))]
    assert [(sync.kind, sync.line) for sync in sim.result.syncs] == [("item", line_of("# waits"))]
    assert sim.result.step_ms is not None
    assert "on NVIDIA H200, simulated for 3 steps" in str(sim)
    assert "fix: " in str(sim)


def test_a_block_that_trains_on_the_cpu_alone_is_told_so() -> None:
    with simulate("h200") as sim:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.randn(4, 8)).mean().backward()
        optimizer.step()
    (found,) = sim.findings
    assert "never uses the GPU" in found.message
    assert "no device bug was found" not in str(sim)


def test_what_happened_so_far_can_be_asked_within_it() -> None:
    with simulate("t4") as sim:
        before = sim.peak.allocated
        kept = torch.empty(1 << 20, device="cuda")
        assert sim.peak.allocated == before + kept.nbytes


def test_attention_with_a_learned_bias_keeps_its_scores_for_backward() -> None:
    """As in T5, whose bias is looked up by distance: no fused kernel takes a mask whose rows lie apart."""
    with simulate("h200") as sim:
        bias = nn.Embedding(32, 12).cuda()(torch.zeros(256, 256, dtype=torch.int64).cuda()).permute(2, 0, 1)[None]
        query, key, value = (torch.randn(8, 12, 256, 64).cuda().bfloat16().requires_grad_() for _ in range(3))

        def kept(mask: torch.Tensor) -> int:
            before = torch.cuda.memory_allocated()
            attended = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            return torch.cuda.memory_allocated() - before - attended.nbytes

        apart, together = kept(bias.bfloat16()), kept(bias.bfloat16().contiguous())
    scores = 4 * 8 * 12 * 256 * 256  # in fp32
    assert together < 0.1 * scores < scores < apart
    assert sim.findings == ()


def everything() -> list[dict[str, object]]:
    owners = [torch, torch.cuda, torch.cuda.memory, torch.version, torch.utils, torch._C, torch._VF, nn.functional]
    owners += [nn.Module, nn.RNNBase, Optimizer, DataLoader, FakeTensor, torch.backends.cudnn, torch.backends.cuda]
    flags = {
        "swaps": torch.__future__.get_swap_module_params_on_conversion(),
        "fast": torch.backends.mha.get_fastpath_enabled(),
        "lifts": torch._C._only_lift_cpu_tensors(),
        "accelerator": sys.intern(str(torch.accelerator.current_accelerator())),
        "device": sys.intern(str(torch.get_default_device())),
        "modes": torch._C._len_torch_dispatch_stack(),
        "functions": torch._C._len_torch_function_stack(),
        "hooks": len(nn.modules.module._global_forward_hooks),
        "available": torch.cuda.is_available(),
    }
    return [*({k: v for k, v in vars(owner).items() if k != "__warningregistry__"} for owner in owners), flags]


@pytest.mark.parametrize("error", [None, ValueError("mine"), KeyboardInterrupt()])
def test_everything_is_put_back_also_after_an_error(error: BaseException | None) -> None:
    with simulate("h200"):
        torch.zeros(1, device="cuda")  # so that what torch imports when it is first needed is there
    before = everything()
    with suppress(ValueError, KeyboardInterrupt), simulate("h200"):
        torch.set_default_device("cuda")
        train(net(), torch.optim.SGD(net().parameters(), 0.1))
        if error is not None:
            raise error
    for was, now in zip(before, everything(), strict=True):
        assert {key for key in was.keys() | now.keys() if was.get(key) is not now.get(key)} == set()
    grown = torch.ones(2, requires_grad=True)
    (grown * 3).sum().backward()
    assert grown.grad.tolist() == [3.0, 3.0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_after_a_block_a_machine_without_a_gpu_says_so_in_pytorchs_words() -> None:
    with simulate("h200"):
        train(net().cuda(), torch.optim.SGD(net().parameters(), 0.1))
    for ask in (torch.ones(2).cuda, partial(torch.ones, 2, device="cuda"), torch.cuda.get_rng_state):
        with pytest.raises((RuntimeError, AssertionError), match=r"Found no NVIDIA driver|not compiled with CUDA"):
            ask()
        assert not torch.cuda.is_initialized()


def test_models_and_optimizers_of_before_come_back_with_their_values() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    weight = model[0].weight
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    state = {name: value.clone() for name, value in optimizer.state[weight].items()}
    with simulate("h200"):
        model.cuda()
        assert model[0].weight is weight
        assert weight.is_cuda
        loss = train(model, optimizer)
        kept = model(torch.randn(4, 8).cuda())  # a graph that still holds the weights after the block
    assert loss.is_cuda
    assert kept.is_cuda
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(was, now.grad) for was, now in zip(gradients, model.parameters(), strict=True))
    assert all(torch.equal(state[name], value) for name, value in optimizer.state[weight].items())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(before["0.weight"], weight)


@pytest.mark.parametrize("use", [lambda t: t + 1, lambda t: t.sum().item(), lambda t: t.cpu(), lambda t: t.backward()])
def test_tensors_of_the_block_are_refused_after_it(use) -> None:
    with simulate("h200"):
        tensor = torch.ones((), device="cuda", requires_grad=True) * 2
    with pytest.raises(CannotSimulate, match="after the simulation had ended"):
        use(tensor)


def test_a_block_ends_after_its_steps() -> None:
    after = False
    with simulate("h200", steps=2) as sim:
        model = net().cuda()
        train(model, torch.optim.SGD(model.parameters(), 0.1), rounds=10)
        after = True
    assert not after
    assert sim.result.completed == sim.result.steps == 2


def test_a_program_that_catches_everything_is_not_ended() -> None:
    with simulate("h200", steps=1) as sim:
        model = net().cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            with suppress(BaseException):
                train(model, optimizer, rounds=1)
    assert sim.result.completed == 5


def test_memory_runs_out_at_the_persons_line() -> None:
    with pytest.raises(torch.OutOfMemoryError), simulate(generic("4GiB")) as sim:
        torch.empty(8 << 30, dtype=torch.uint8, device="cuda")  # too much
    (finding,) = sim.findings
    assert (finding.code, finding.line) == ("out-of-memory", line_of("# too much"))


def test_weights_on_the_host_are_real_however_many_there_are() -> None:
    with simulate("h200"):
        layer = nn.Linear(1024, 1024)
    assert 0.01 < layer.weight.std() < 0.03


def test_wrong_uses_are_explained() -> None:
    with pytest.raises(BadArgument, match="steps=0"):
        simulate("h200", steps=0)
    with pytest.raises(BadArgument, match="did you mean"):
        simulate("h2000")
    sim = simulate("h200")
    assert "not used yet" in repr(sim)
    with pytest.raises(HotloopError, match="nothing was simulated"):
        _ = sim.result
    with sim, pytest.raises(HotloopError, match="in use"), simulate("t4"):
        pass
    with pytest.raises(HotloopError, match="runs once"), sim:
        pass


def test_the_package_imports_no_torch_by_itself() -> None:
    code = (
        "import sys\n"
        "from hotloop.apps.simulate import cards, study\n"  # what a command needs beside the run itself
        "assert cards.card('t4').key == 't4'\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_a_real_gpu_waits_until_the_block_is_over() -> None:
    name = torch.cuda.get_device_name()
    real = torch.ones(4, device="cuda", requires_grad=True)
    with simulate("t4") as sim:
        assert torch.cuda.get_device_name() == "Tesla T4"
        model = net().cuda()
        train(model, torch.optim.Adam(model.parameters()))
        with pytest.raises(CannotSimulate, match="real GPU"):
            real + 1
    assert sim.result.completed == 3
    assert torch.cuda.get_device_name() == name
    (real * 3).sum().backward()
    assert real.grad.tolist() == [3.0] * 4
    assert torch.zeros(3).pin_memory().is_pinned()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_real_gpu_can_be_used_first_after_a_block() -> None:
    code = (
        "import torch\n"
        "from hotloop import simulate\n"
        "with simulate('t4'):\n"
        "    x = torch.ones(4, device='cuda', requires_grad=True); (x * 2).sum().backward()\n"
        "last = torch.device('cuda', torch.cuda.device_count() - 1)\n"
        "y = torch.ones(4, device=last, requires_grad=True); (y * 3).sum().backward()\n"
        "assert y.grad.tolist() == [3.0] * 4 and torch.rand(2, device=last).sum().item() > 0\n"
        "assert torch.nn.functional.dropout(y, 0.5).sum().item() >= 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
