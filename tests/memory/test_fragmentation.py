"""Memory that is enough but in pieces: told from memory that is full, mended once, and the batch run again whole."""

import gc
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hotloop import Loop, survive_oom
from hotloop._torch import allocator_settings, set_allocator_settings
from hotloop.device.backend import backend_of
from hotloop.errors import MemoryWarning
from hotloop.memory import fragmentation
from hotloop.memory.fragmentation import Fragmented, are_on, judged, mend
from hotloop.step.retry import OomRetry, OutOfMemory

CPU = torch.device("cpu")
MIB = 2**20
GIB = 2**30
BYTES = st.integers(0, 200 * GIB)
SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 120.11 GiB is"
    " free. 8.00 GiB allowed; Of the allocated memory 4.86 GiB is allocated by PyTorch, and 3.10 GiB is reserved by"
    " PyTorch but unallocated. If reserved but unallocated memory is large try setting"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def figures(reserved: int, allocated: int, between: int) -> dict[str, int]:
    """As `torch.cuda.memory_stats` names them, among others."""
    return {
        "reserved_bytes.all.current": reserved,
        "allocated_bytes.all.current": allocated,
        "inactive_split_bytes.all.current": between,
        "reserved_bytes.all.peak": 200 * GIB,
        "num_ooms": 1,
    }


@pytest.mark.parametrize(
    ("said", "statistics"),
    [
        pytest.param(SAID, figures(8 * GIB, 7 * GIB, GIB), id="full"),
        pytest.param(SAID, figures(8 * GIB, 4 * GIB, 0), id="nothing lies between tensors"),
        pytest.param(SAID, {}, id="a device without figures"),
        pytest.param("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", figures(8 * GIB, GIB, 7 * GIB), id="not the allocator"),
        pytest.param("Tried to allocate 512 bytes", figures(0, 0, 0), id="nothing is held"),
    ],
)
def test_everything_else_is_not(said: str, statistics: dict[str, int]) -> None:
    assert judged(said, statistics) is None


@given(requested=st.integers(1, 100 * 2**10), reserved=BYTES, allocated=BYTES, between=BYTES)
def test_fragmented_is_what_would_fit_into_the_pieces_together(
    requested: int, reserved: int, allocated: int, between: int
) -> None:
    asked = requested * MIB
    found = judged(f"CUDA out of memory. Tried to allocate {requested}.00 MiB.", figures(reserved, allocated, between))
    fits = reserved - allocated >= asked and between >= asked
    assert (found is not None) == fits
    if found is not None:
        assert found.requested == asked <= found.unused <= min(reserved - allocated, between)
        more = judged(f"Tried to allocate {requested}.00 MiB.", figures(reserved + asked, allocated, between))
        assert more is not None, "more memory in pieces is not less"


def test_the_settings_of_pytorch_are_read_and_written() -> None:
    before = allocator_settings()
    if before is None:
        pytest.skip("this PyTorch does not say what its allocator was told")
    try:
        set_allocator_settings("max_split_size_mb:64, expandable_segments:True")
        assert are_on()
        set_allocator_settings("expandable_segments:False")
        assert allocator_settings() == "expandable_segments:False"
        assert not are_on()
    finally:
        set_allocator_settings(before)


def test_without_word_of_the_settings_nothing_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fragmentation, "allocator_settings", lambda: None)
    monkeypatch.setattr(backend_of("cpu"), "has_expandable_segments", lambda: True)

    assert not are_on()
    assert not mend(Fragmented(MIB, MIB), CPU)


@dataclass
class Allocator:
    """An allocator whose memory is in pieces; where the flow is tested, the CPU plays the GPU."""

    told: list[str] = field(default_factory=lambda: [""])
    unused: int = 3 * MIB
    refuses: bool = False

    def change(self, settings: str) -> None:
        self.told.append(settings)
        if self.refuses:
            raise ValueError("Unrecognized key 'expandable_segments' in CUDA allocator config.")


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    fake = Allocator()
    backend = backend_of("cpu")
    monkeypatch.setattr(backend, "memory_stats", lambda: figures(9 * MIB, 9 * MIB - fake.unused, fake.unused))
    monkeypatch.setattr(backend, "has_expandable_segments", lambda: True)
    monkeypatch.setattr(fragmentation, "allocator_settings", lambda: fake.told[-1])
    monkeypatch.setattr(fragmentation, "set_allocator_settings", fake.change)
    return fake


def full() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has")


def sizes_of(memory: OutOfMemory, failures: int) -> list[int]:
    """The sizes that a pass over eight items is tried with, when the first attempts fail."""
    sizes: list[int] = []

    def attempt(items: int, size: int | None) -> None:
        sizes.append(size or items)
        if len(sizes) <= failures:
            raise full()

    OomRetry(attempt, memory, int)(8)
    return sizes


def test_the_whole_batch_is_run_again_once_before_it_is_cut(allocator: Allocator) -> None:
    memory = OutOfMemory([], CPU)
    with pytest.warns(
        MemoryWarning,
        match=r"^memory was fragmented: 3.0 MiB reserved and unused in pieces; expandable segments are on now$",
    ):
        assert sizes_of(memory, 1) == [8, 8]
    assert allocator.told == ["", "expandable_segments:True"]
    assert memory.mended == Fragmented(2 * MIB, 3 * MIB)
    assert (memory.portion.failures, memory.portion.cuts) == (1, 0)
    assert sizes_of(memory, 2) == [8, 4, 2], "once is enough"
    assert sizes_of(OutOfMemory([], CPU), 1) == [8, 4], "for others as well"
    assert len(allocator.told) == 2


ON, OFF = "expandable_segments:True", "expandable_segments:False"
# The allocator, what it was told before, passes that fail, the sizes that are tried, and what it is told.
FLOWS: dict[str, tuple[dict[str, Any], str, int, list[int], list[str]]] = {
    "the person's settings": ({}, "max_split_size_mb:64,", 1, [8, 8], [f"max_split_size_mb:64,{ON}"]),
    "on already": ({}, ON, 1, [8, 4], []),
    "off by the person": ({}, f"max_split_size_mb:64,{OFF}", 1, [8, 4], []),
    "memory is full": ({"unused": MIB}, "", 1, [8, 4], []),
    "it is refused": ({"refuses": True}, "", 3, [8, 4, 2, 1], [ON, OFF]),
    "it does not help": ({"is_full": True}, "", 1, [8, 4], [ON, OFF]),
}


@pytest.mark.parametrize(("state", "before", "failures", "sizes", "told"), FLOWS.values(), ids=FLOWS)
def test_segments_are_asked_for_where_nobody_has_decided_and_they_help(
    state: dict[str, Any],
    before: str,
    failures: int,
    sizes: list[int],
    told: list[str],
    allocator: Allocator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def empty(*shape: int, **options: object) -> Tensor:
        raise full()

    if "is_full" in state:
        monkeypatch.setattr(torch, "empty", empty)
    vars(allocator).update(state, told=[before])
    memory = OutOfMemory([], CPU)
    with pytest.warns(MemoryWarning) if sizes == [8, 8] else nullcontext():
        assert sizes_of(memory, failures) == sizes
    assert allocator.told == [before, *told]
    assert (memory.mended is None) == (sizes != [8, 8])


def test_the_memory_of_a_capture_is_no_hole(allocator: Allocator) -> None:
    memory = OutOfMemory([], CPU)
    captures = ["a graph"]
    memory.has_captures = lambda: bool(captures)
    memory.give_way = captures.clear
    tried: list[int] = []

    def attempt(items: int, size: int | None) -> None:
        tried.append(size or items)
        if tried[-1] > 4:
            raise full()

    OomRetry(attempt, memory, int)(8)
    assert tried == [8, 4]
    assert allocator.told == [""]


def test_one_item_that_does_not_fit_may_be_fragmented_too(allocator: Allocator) -> None:
    memory = OutOfMemory([], CPU, most=1)
    with pytest.warns(MemoryWarning, match="fragmented"):
        assert sizes_of(memory, 1) == [1, 1]


def test_nothing_of_the_failed_attempt_lives_while_memory_is_mended(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[bool] = []
    gone: list[bool] = []

    class Activation:
        def __del__(self) -> None:
            gone.append(True)

    def attempt(items: int, size: int | None) -> None:
        kept = [Activation()]
        kept.append(kept)  # type: ignore[arg-type]  # a cycle, as a traceback makes one
        if not freed:
            raise full()

    def change(settings: str) -> None:
        freed.append(bool(gone))
        allocator.change(settings)

    monkeypatch.setattr(fragmentation, "set_allocator_settings", change)
    with pytest.warns(MemoryWarning):
        OomRetry(attempt, OutOfMemory([], CPU), int)(8)
    assert freed == [True]


def network() -> nn.Module:
    """One that draws random numbers and writes buffers, so that a pass that is not taken back shows."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(12, 3))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(8, 6, generator=generator) for _ in range(count)]
    return [(x, x[:, :3].argmax(1)) for x in inputs]


@dataclass
class Failing:
    """An objective that runs out of memory after the forward pass of some of its calls."""

    failing: tuple[int, ...] = ()
    calls: int = 0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if self.calls - 1 in self.failing:
            raise full()
        return loss


def trained(objective: Failing, **options: int) -> tuple[Loop, nn.Module]:
    model = network()
    loop = Loop(
        model, torch.optim.Adam(model.parameters(), 0.01), objective=objective, device="cpu", plan="plain", **options
    )
    torch.manual_seed(7)
    for batch in batches(8):
        loop.step(batch)
    return loop, model


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.filterwarnings("ignore:batch normalisation")  # which sees each batch of a window by itself
@pytest.mark.filterwarnings("ignore:.*your code changes")  # the number of calls
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("at", [0, 1, 5], ids=["first", "second", "later"])
def test_a_loop_trains_to_the_bit_as_if_memory_had_never_run_out(
    allocator: Allocator, at: int, accumulate: int
) -> None:
    _, expected = trained(Failing(), accumulate=accumulate)
    with pytest.warns(MemoryWarning, match="memory was fragmented: 3.0 MiB"):
        loop, model = trained(Failing((at,)), accumulate=accumulate)
    assert_same(model, expected)
    assert loop.plan.micro_batch is None
    assert loop.out_of_memory == 1
    assert loop.steps == 8 // accumulate
    assert loop.fragmented == Fragmented(2 * MIB, 3 * MIB)


def test_pieces_follow_where_it_was_not_enough_and_both_are_said(allocator: Allocator) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loop, _ = trained(Failing((2, 3)))
    words = [str(each.message) for each in said]
    assert [each.split(":")[0] for each in words if "your code changes" not in each] == [
        "memory was fragmented",
        "out of memory with 8 items at once",
    ]
    assert loop.plan.micro_batch == 4
    assert loop.out_of_memory == 2


@pytest.mark.filterwarnings("ignore:.*your code changes")  # the number of calls
def test_the_report_says_it(allocator: Allocator) -> None:
    model = network()
    loop = Loop(model, torch.optim.Adam(model.parameters()), objective=Failing((1,)), device="cpu", plan="plain")
    with pytest.warns(MemoryWarning, match="fragmented"):
        report = loop.fit(batches(4), progress=False)
    assert report.levers == ("expandable segments",)
    assert (report.out_of_memory, report.micro_batch) == (1, None)
    calm = Loop(model, torch.optim.Adam(model.parameters()), objective=Failing(), device="cpu", plan="plain")
    assert calm.fit(batches(4), progress=False).levers == ()


def test_survive_oom_does_it_too(allocator: Allocator) -> None:
    gradients = []
    for failing in ((), (0,)):
        model = network()
        backward = survive_oom(model, objective=Failing(failing))
        torch.manual_seed(7)
        if failing:
            with pytest.warns(MemoryWarning, match="expandable segments are on now"):
                backward(batches(1)[0])
        else:
            backward(batches(1)[0])
        gradients.append([p.grad for p in model.parameters()])
        assert backward.micro_batch is None
        assert backward.failures == len(failing)
        assert (backward.fragmented is not None) == bool(failing)
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


BLOCK = 120 * MIB  # whole pages of 20 MiB, which is what expandable segments take and give back
CACHED = 8 * BLOCK


@pytest.fixture
def undecided() -> Iterator[None]:
    """PyTorch's allocator as it is when nobody has said anything about expandable segments."""

    def forget() -> None:
        gc.collect()
        torch.cuda.empty_cache()
        set_allocator_settings("expandable_segments:False")
        set_allocator_settings("")

    forget()
    yield
    forget()


@contextmanager
def capped(bytes_: int) -> Iterator[None]:
    """So much more than is reserved now, and no more."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + bytes_) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def room(bytes_: int) -> Tensor:
    return torch.empty(bytes_, dtype=torch.uint8, device="cuda")


def with_holes() -> list[Tensor]:
    """Every second block of a segment, which the others have left."""
    blocks = [room(BLOCK) for _ in range(8)]
    del blocks[1::2]
    return blocks


@dataclass
class Holey:
    """An objective that, from some call on, needs one large block when memory has holes."""

    begin: int = 0
    calls: int = 0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        if self.calls > self.begin:
            between = with_holes()
            large = room(3 * BLOCK)
            del between, large
        return F.cross_entropy(model(batch[0]), batch[1])


def cuda_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 3)).cuda()


def on_a_gpu(objective: Callable[..., Tensor], steps: int, *, cap: bool) -> tuple[Loop, nn.Module]:
    model = cuda_network()
    loop = Loop(model, torch.optim.Adam(model.parameters(), 0.01), objective=objective, device="cuda", plan="plain")
    data = [(x.cuda(), y.cuda()) for x, y in batches(steps)]
    torch.manual_seed(7)
    if not cap:
        for batch in data:
            loop.step(batch)
        return loop, model
    with capped(CACHED + 2 * BLOCK):
        cached = room(CACHED)  # a segment from which the blocks will be cut
        del cached
        for batch in data:
            loop.step(batch)
    return loop, model


@pytest.mark.gpu
@pytest.mark.parametrize("begin", [0, 5], ids=["first", "later"])
def test_a_fragmented_gpu_needs_no_pieces(undecided: None, begin: int) -> None:
    _, expected = on_a_gpu(Holey(begin), 8, cap=False)
    gc.collect()
    torch.cuda.empty_cache()
    with pytest.warns(MemoryWarning) as told:  # also that the objective counts its calls
        loop, model = on_a_gpu(Holey(begin), 8, cap=True)
    said = r"memory was fragmented: \d+\.\d MiB reserved and unused in pieces"
    assert any(re.search(said, str(each.message)) for each in told)
    assert loop.fragmented.requested == 3 * BLOCK
    assert loop.plan.micro_batch is None
    assert loop.out_of_memory == 1
    assert are_on()
    assert_same(model, expected)


@pytest.mark.gpu
def test_holes_between_tensors_that_stay_are_survived_in_pieces(undecided: None) -> None:
    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        large = room(3 * BLOCK * len(batch[0]) // 8)
        del large
        return F.cross_entropy(model(batch[0]), batch[1])

    model = cuda_network()
    loop = Loop(model, torch.optim.Adam(model.parameters()), objective=objective, device="cuda", plan="plain")
    batch = tuple(t.cuda() for t in batches(1)[0])
    loop.step(batch)
    gc.collect()
    torch.cuda.empty_cache()
    with capped(CACHED + 2 * BLOCK):
        cached = room(CACHED)
        del cached
        staying = with_holes()
        with pytest.warns(MemoryWarning, match="in micro-batches of 4"):
            loop.step(batch)
        del staying
    assert loop.fragmented is None
    assert not are_on()
