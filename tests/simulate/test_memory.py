"""The memory of a simulated GPU: what counts where, the peak, running out at a line, and what torch.cuda is told."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from hotloop.apps.simulate.allocator import Allocator
from hotloop.apps.simulate.cards import Card, generic
from hotloop.apps.simulate.events import Listener, Operation, Shape
from hotloop.apps.simulate.library_memory import Constants
from hotloop.apps.simulate.memory import MemoryListener
from hotloop.apps.simulate.need import STAGE
from hotloop.apps.simulate.workspaces import needs
from hotloop.placement.sites import Site

MIB, GIB = 2**20, 2**30
CONSTANTS = Constants(
    architecture="any",
    torch="2.11",
    calibrated=True,
    source="made up",
    context={"base": 200 * MIB, "blas": 50 * MIB},
    convolution={
        "forward/tf32/first": ("8 16 16 128 3 1 1 2 1 1 0 0 0 0",),
        "forward/fp32/first": ("8 16 16 128 3 1 1 2 1 1 0 0 0 0",),
    },
    margin=0.1,
)
LINE = Site("train.py", 17, "train")


@pytest.fixture
def memory() -> MemoryListener:
    return MemoryListener(one_gib(), constants=CONSTANTS)


def one_gib() -> Card:
    return replace(generic("1GiB"), capability=(8, 6), architecture="turing")


def figures(memory: MemoryListener, what: str) -> tuple[int, int]:
    """Bytes now and at the peak, as `torch.cuda` asks for them."""
    stats = memory.memory_stats()
    return stats[f"{what}_bytes.all.current"], stats[f"{what}_bytes.all.peak"]


def operation(name: str = "aten.relu.default", *inputs: Shape, module: str = "", **arguments: object) -> Operation:
    return Operation(name, inputs, inputs[:1], dict(arguments), "forward", module, LINE)


def run(memory: MemoryListener, what: Operation, results: dict[int, int], kind: str = "activation") -> None:
    memory.before(what)
    for key, size in results.items():
        memory.allocated(key, size, kind)
    memory.after(what)


def test_it_listens(memory: MemoryListener) -> None:
    heard: Listener = memory
    heard.copied(5, "to the device", pinned=False, blocking=True, place=LINE)
    heard.waited("item", LINE)
    heard.loaded(0.1, 0)
    heard.step()
    heard.freed(99)  # of what was never told
    heard.named(99, "parameter")
    assert figures(memory, "allocated")[0] == 0


def test_categories_add_up_to_the_peak(memory: MemoryListener) -> None:
    memory.allocated(1, 30 * MIB, "temporary")
    memory.named(1, "parameter")
    run(memory, operation(module="encoder.layer"), {2: 20 * MIB, 3: 100})
    run(memory, operation(module="head"), {4: 12 * MIB})
    memory.named(4, "gradient")  # which it was at the peak already
    memory.freed(2)
    memory.allocated(5, 12 * MIB, "optimizer")
    assert memory.peak.allocated == 62 * MIB + 512
    assert memory.categories == {
        "parameters": 30 * MIB,
        "gradients": 12 * MIB,
        "activations": 20 * MIB + 512,
        "context": 200 * MIB,
    }
    assert memory.modules == {"encoder.layer": 20 * MIB + 512}
    assert memory.peak.reserved == 64 * MIB
    assert memory.peak.process == 264 * MIB


def test_a_blas_workspace_is_taken_once_for_each_thread(memory: MemoryListener) -> None:
    for key in (1, 2):
        run(memory, operation("aten.mm.default"), {key: 512})
    assert figures(memory, "allocated")[0] == 1024 + 8_519_680
    backward = replace(operation("aten.mm.default"), phase="backward")
    run(memory, backward, {3: 512})
    assert figures(memory, "allocated")[0] == 1536 + 2 * 8_519_680
    assert memory.context == 250 * MIB
    assert memory.categories["workspaces"] == 2 * 8_519_680


X = Shape((8, 16, 128, 128), "float32", 4)
W = Shape((16, 16, 3, 3), "float32", 4)


def test_a_convolution_holds_its_workspace_for_a_moment(memory: MemoryListener) -> None:
    run(memory, operation("aten.convolution.default", X, W, groups=1), {1: X.nbytes})
    assert figures(memory, "allocated")[0] == X.nbytes
    assert memory.peak.allocated == 2 * X.nbytes
    assert memory.categories["workspaces"] == X.nbytes


def test_and_makes_do_without_where_there_is_no_room(memory: MemoryListener) -> None:
    memory.set_per_process_memory_fraction(40 / 1024)
    x = replace(X, sizes=(32, 16, 128, 128))
    run(memory, operation("aten.convolution.default", x, W, groups=1), {1: x.nbytes})
    assert not memory.shortage
    assert memory.peak.allocated == x.nbytes


def test_what_a_stage_took_is_given_back_before_the_next_result(memory: MemoryListener) -> None:
    x, gradient = Shape((64, 32, 256), "float32", 4), Shape((64, 32, 256), "float32", 4, strides=(256, 16384, 1))
    backward = operation("aten._cudnn_rnn_backward.default", x, gradient, mode=2, hidden_size=256, num_layers=1)
    weights = 8 * MIB
    needed = {need.key: need.bytes for need in needs(backward, one_gib(), CONSTANTS)}
    run(memory, backward, {1: x.nbytes, 2: 512, 3: 512, 4: weights})
    assert figures(memory, "allocated")[0] == x.nbytes + 1024 + weights
    before = x.nbytes + 1024 + gradient.nbytes + needed[STAGE]
    after = x.nbytes + 1024 + weights + needed[""]
    assert memory.peak.allocated == pytest.approx(max(before, after), abs=1024)


def test_a_reserve_lives_as_long_as_its_handle(memory: MemoryListener) -> None:
    x = Shape((64, 64, 64), "float32", 4)
    lstm = operation("aten._cudnn_rnn.default", x, mode=2, hidden_size=64, num_layers=1, train=True)
    run(memory, lstm, {1: x.nbytes, 2: 0})
    reserve = 5 * x.nbytes + 512
    assert figures(memory, "allocated")[0] == x.nbytes + reserve
    memory.freed(1)
    assert figures(memory, "allocated")[0] == reserve
    memory.freed(2)
    assert figures(memory, "allocated")[0] == 0


def test_it_runs_out_at_the_line(memory: MemoryListener) -> None:
    memory.allocated(1, 700 * MIB, "parameter")
    memory.before(operation(module="block.3"))
    with pytest.raises(
        torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 200\.00 MiB\. GPU 0"
    ) as error:
        memory.allocated(2, 199 * MIB, "activation")
    assert "total capacity of 1.00 GiB of which 124.00 MiB is free" in str(error.value)
    assert memory.shortage == "memory runs out at train.py:17: 200.0 MiB are asked for where 124.0 MiB can be had"
    assert memory.fits is False
    memory.freed(2)  # what was never had
    memory.allocated(3, 100 * MIB, "activation")  # a script that catches the error goes on
    assert figures(memory, "allocated")[0] == 800 * MIB


def test_what_an_operation_held_goes_also_where_it_ran_out() -> None:
    """A script that catches the error and goes on has its memory back."""
    memory = MemoryListener(one_gib())
    apart = Shape((64, 64, 32, 32), "float32", 4, strides=(131072, 1024, 32, 1))  # which is copied first
    weight = Shape((64, 64, 3, 3), "float32", 4)
    memory.before(operation("aten.convolution.default", apart, weight))
    with pytest.raises(torch.OutOfMemoryError):
        memory.allocated(1, 2**31, "activation")
    memory.before(operation())
    assert figures(memory, "allocated")[0] == 0


def test_a_cap_is_said(memory: MemoryListener) -> None:
    memory.set_per_process_memory_fraction(0.25)
    with pytest.raises(torch.OutOfMemoryError, match=r"256.00 MiB allowed"):
        memory.allocated(1, 300 * MIB, "parameter")


def test_cached_memory_is_released_first(memory: MemoryListener) -> None:
    memory.allocated(1, 600 * MIB, "activation")
    memory.freed(1)
    memory.allocated(2, 700 * MIB, "activation")
    assert memory.memory_stats()["num_alloc_retries"] == 1
    assert figures(memory, "reserved")[0] == 700 * MIB


@pytest.mark.parametrize(("size", "fits"), [(600, True), (780, None), (900, False)])
def test_a_verdict_has_a_margin(memory: MemoryListener, size: int, fits: bool | None) -> None:
    """There are 824 MiB beside the context; 10% of them are 82."""
    with pytest.raises(torch.OutOfMemoryError) if fits is False else nullcontext():
        memory.allocated(1, size * MIB, "parameter")
    assert memory.fits is fits
    notes = memory.to_record()["notes"]
    said = {True: (), None: ("too close to say whether it fits: 756.6 MiB to 803.4 MiB of 824.0 MiB are allocated",)}
    assert notes == said.get(fits, notes)
    assert fits is not False or "900.0 MiB are asked for" in notes[0]


@pytest.mark.parametrize(("size", "fits"), [(85, True), (95, None)])
def test_the_margin_is_that_of_a_cap_where_there_is_one(memory: MemoryListener, size: int, fits: bool | None) -> None:
    memory.set_per_process_memory_fraction(100 / 1024)
    memory.allocated(1, size * MIB, "parameter")
    assert memory.fits is fits


def test_what_was_not_measured_is_said() -> None:
    memory = MemoryListener(one_gib(), constants=replace(CONSTANTS, calibrated=False))
    assert memory.to_record()["notes"] == ("what libraries take for themselves was not measured on turing GPUs",)


def test_torch_cuda_is_answered(memory: MemoryListener) -> None:
    assert memory.mem_get_info() == (824 * MIB, GIB)
    memory.allocated(1, 100 * MIB, "activation")
    memory.freed(1)
    assert figures(memory, "allocated") == (0, 100 * MIB)
    assert figures(memory, "reserved") == (100 * MIB, 100 * MIB)
    assert memory.mem_get_info() == (724 * MIB, GIB)
    memory.empty_cache()
    memory.reset_peak_memory_stats()
    memory.reset_accumulated_memory_stats()
    assert memory.mem_get_info() == (824 * MIB, GIB)
    assert figures(memory, "allocated") == figures(memory, "reserved") == (0, 0)
    assert memory.peak.allocated == 100 * MIB  # of the run


def requests() -> Iterator[tuple[int, int, int | None]]:
    """(number, bytes, number of one that goes afterwards)

    No two free blocks are of one size: among such, PyTorch takes the one at the lower address, which the driver chose.
    """
    for number in range(300):
        size = (number * 7919 % 97 + 1) * (4096 if number % 3 else 400_000) + 3584 * number
        yield number, size, number * 5 // 7 if number % 2 else None


def test_where_the_driver_puts_segments_does_not_matter_for_these_requests() -> None:
    def downwards(size: int, end: list[int] = [1 << 40]) -> int:  # noqa: B006
        end[0] -= size
        return end[0]

    figures = []
    for allocator in (Allocator(64 << 30), Allocator(64 << 30, addresses=downwards)):
        live = {}
        for number, size, gone in requests():
            live[number] = allocator.allocate(size)
            if gone in live:
                allocator.free(live.pop(gone))
            figures.append((number, allocator.allocated, allocator.reserved))
    assert figures[:300] == figures[300:]


REAL = """
import json, sys, torch
live, figures = {}, []
for number, size, gone in json.loads(sys.argv[1]):
    live[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
    live.pop(gone, None)
    figures.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
print(json.dumps(figures))
"""


@pytest.mark.gpu
def test_the_model_counts_as_pytorch_does() -> None:
    """The same requests, in the same order, to the allocator of a fresh process and to the model."""
    asked = json.dumps(list(requests()))
    made = subprocess.run([sys.executable, "-c", REAL, asked], capture_output=True, text=True, check=True)
    model = MemoryListener(generic("64GiB"), constants=CONSTANTS)
    for (number, size, gone), real in zip(requests(), json.loads(made.stdout), strict=True):
        model.allocated(number, size, "activation")
        if gone is not None:
            model.freed(gone)
        assert [figures(model, "allocated")[0], figures(model, "reserved")[0]] == real, number
