"""The largest batch: exact under an artificial end of memory, in few tries, and no trace of it remains."""

import copy
import gc
import math
import random
import time
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import BadArgument
from hotloop.memory.micro_batches import rows_of
from hotloop.memory.usage import Usage
from hotloop.run import largest
from hotloop.run.largest import Largest, Try, climb, largest_batch

from ..same import same

PLENTY = 600.0  # seconds: a busy machine must not end a search
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

pytestmark = pytest.mark.usefixtures("light_heap")


class Odd(nn.Module):
    """Everything that a step may change: batch statistics, dropout, tied weights, a count and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.calls = 0
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        features = self.drop(self.norm(self.embed(x)))
        self.seen.add_(features.detach().mean(0))
        return self.head(features)


def tokens(items: int = 12) -> tuple[Tensor, Tensor]:
    x = torch.arange(items) % 11
    return x, (x + 1) % 11


def loop_of(objective: Any = None, device: str = "cpu", **options: Any) -> hotloop.Loop:
    torch.manual_seed(0)
    model = Odd()
    options |= {"objective": objective} if objective else {"loss": nn.CrossEntropyLoss()}
    return hotloop.Loop(model, torch.optim.AdamW(model.parameters()), device=device, plan="plain", **options)


def within(capacity: int) -> Callable[[nn.Module, Any], Tensor]:
    """A real objective that runs out of memory above so many items, after it has drawn and written."""

    def objective(model: nn.Module, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if len(batch[0]) > capacity:
            raise torch.OutOfMemoryError(f"{len(batch[0])} items")
        return loss

    return objective


def everything(loop: hotloop.Loop) -> dict[str, Any]:
    return {
        "weights": {name: value.clone() for name, value in loop.model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in loop.model.parameters()],
        "optimizer": copy.deepcopy(loop._core.subject.optimizers[0].state_dict()),
        "calls": loop.model.calls,
        "modes": [module.training for module in loop.model.modules()],
        "attributes": [sorted(vars(module)) for module in loop.model.modules()],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if loop.device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "steps": loop.steps,
    }


@given(st.integers(0, 10**6), st.integers(1, 5000), st.integers(1, 10**7))
def test_every_capacity_is_found_exactly_in_few_tries(capacity: int, start: int, bound: int) -> None:
    asked: list[int] = []

    def fits(items: int) -> bool:
        asked.append(items)
        return items <= capacity

    low, high = climb(fits, start, bound)
    assert (low, high) == (min(capacity, bound), min(capacity, bound) + 1)
    assert all(1 <= items <= bound for items in asked)
    assert len(set(asked)) == len(asked)
    assert len(asked) <= 2 * math.log2(max(capacity, start) + 1) + 3


@given(st.integers(1, 10**6), st.integers(0, 20))
def test_an_early_end_says_what_is_certain(capacity: int, tries: int) -> None:
    asked: list[int] = []

    def fits(items: int) -> bool | None:
        asked.append(items)
        return None if len(asked) > tries else items <= capacity

    low, high = climb(fits, 8, 10**7)
    assert low <= capacity < high


@pytest.mark.parametrize("capacity", [0, 2, 37])
def test_real_steps_find_the_capacity_and_leave_no_trace(capacity: int) -> None:
    loop = loop_of(within(capacity), clip_norm=0.5)
    loop.model.norm.eval()  # else it refuses a batch of one
    if capacity:
        loop.step(tokens(2))
    before = everything(loop)
    found = largest_batch(loop._core.subject, tokens(), seconds=PLENTY)
    assert (found.items, found.reason) == (capacity, "memory")
    assert {each.items for each in found.tried if each.fits} <= set(range(1, capacity + 1))
    assert all(each.items > capacity for each in found.tried if not each.fits)
    assert found.best <= found.items
    assert same(before, everything(loop))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("trained", [False, True])
def test_everything_is_as_it_was_before(device: str, trained: bool) -> None:
    loop = loop_of(device=device)
    if trained:
        for batch in loop.batches([tokens(), tokens(7)]):
            loop.step(batch)
    before = everything(loop)
    tied = loop.model.head.weight
    addresses = [parameter.data_ptr() for parameter in loop.model.parameters()]
    found = largest_batch(loop._core.subject, tokens(), limit=20)
    assert found.items == 20
    assert tied is loop.model.embed.weight
    assert addresses == [parameter.data_ptr() for parameter in loop.model.parameters()]
    assert same(before, everything(loop))


@pytest.mark.filterwarnings("ignore:batch normalisation")  # which sees each batch of a window by itself
def test_the_training_after_it_is_the_training_without_it() -> None:
    def weights(search: bool) -> Tensor:
        loop = loop_of(accumulate=2)
        for number, batch in enumerate(loop.batches([tokens(5), tokens(6), tokens(7)])):
            loop.step(batch)
            if search and number == 0:  # in the middle of a window
                largest_batch(loop._core.subject, tokens(), limit=9)
        return loop.model.head.weight.detach()

    assert torch.equal(weights(True), weights(False))


def test_any_other_error_is_passed_on_and_leaves_no_trace() -> None:
    def objective(model: nn.Module, batch: Any) -> Tensor:
        loss = model(batch[0]).sum()
        if len(batch[0]) > 10:
            raise RuntimeError("a mistake in the model")
        return loss

    loop = loop_of(objective)
    loop.step(tokens(3))
    before = everything(loop)
    with pytest.raises(RuntimeError, match="a mistake in the model") as raised:
        largest_batch(loop._core.subject, tokens())
    assert "16 items" in raised.value.__notes__[0]
    assert same(before, everything(loop))


def test_live_bytes_decide(monkeypatch: pytest.MonkeyPatch, memory_of: Any) -> None:
    """Real steps in a memory that ends: what was found fits in plain PyTorch too, and a little more does not."""
    capacity = 60_000

    def steps(items: int) -> None:
        torch.manual_seed(0)
        model = Odd()
        optimizer = torch.optim.Adam(model.parameters())
        with memory_of(capacity):
            x, y = rows_of(tokens(), 12, [n % 12 for n in range(items)])
            for _ in range(2):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()

    monkeypatch.setattr(largest, "time_of", lambda step, batch: 1e-3)
    loop = loop_of()
    before = everything(loop)
    with memory_of(capacity):
        found = largest_batch(loop._core.subject, tokens())
    assert found.reason == "memory"
    assert same(before, everything(loop))
    steps(int(found.items * 0.95))
    with pytest.raises(torch.OutOfMemoryError):
        steps(int(found.items * 1.1))


def test_a_cpu_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody raises there: the search ends where the next size is expected to need too much."""
    monkeypatch.setattr(largest, "usage", lambda device: Usage("cpu", free=4 * 2**20, total=2**30))
    monkeypatch.setattr(largest, "time_of", lambda step, batch: 1e-3)
    found = largest_batch(loop_of()._core.subject, tokens(), seconds=PLENTY)
    assert found.reason == "memory"
    peaks = [each.peak for each in found.tried if each.fits]
    assert all(peak is not None and peak <= found.memory for peak in peaks)
    assert max(peaks) > 0.9 * found.memory
    assert all(each.peak is None for each in found.tried if not each.fits)


def test_the_time_is_kept() -> None:
    def slow(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(2e-3 * len(batch[0]))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    loop = loop_of(slow)
    begin = time.perf_counter()
    found = largest_batch(loop._core.subject, tokens(), seconds=1.5)
    assert time.perf_counter() - begin < 20
    assert found.reason == "time"
    assert found.items >= 2
    assert str(found).startswith("at least ")


def test_the_fastest_is_the_smallest_that_is_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of a step: 10 for what is always there and 1 for each item, until a CPU's caches are full."""
    seconds = {2: 12.0, 4: 14.0, 8: 8.1, 16: 16.0, 32: 33.0}
    monkeypatch.setattr(largest, "time_of", lambda step, batch: seconds[len(batch[0])])
    found = largest_batch(loop_of()._core.subject, tokens(), limit=32)
    assert (found.items, found.best) == (32, 8)


def test_a_loader_gives_a_batch_its_length_and_its_order() -> None:
    torch.manual_seed(0)
    x, y = tokens(30)
    loader = DataLoader(TensorDataset(x, y), 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    expected = [batch[0].tolist() for batch in loader]
    loader.generator.manual_seed(1)
    loop = loop_of()
    before = everything(loop)
    found = largest_batch(loop._core.subject, loader)
    assert (found.items, found.reason) == (30, "data")
    assert "the whole dataset" in str(found)
    assert same(before, everything(loop))
    assert [batch[0].tolist() for batch in loader] == expected


def test_an_objective_may_take_its_labels_out_of_the_batch() -> None:
    def taking(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch.pop("y"))

    batch = dict(zip("xy", tokens(), strict=True))
    assert largest_batch(loop_of(taking)._core.subject, batch, limit=6).items == 6
    assert set(batch) == {"x", "y"}


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (iter([tokens()]), {}, "read only once"),
        ([], {}, "no batch"),
        (tokens(), {"limit": 0}, "limit=0"),
        (tokens(), {"seconds": -1.0}, "seconds=-1.0"),
    ],
)
def test_what_cannot_be_searched_is_refused(data: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        largest_batch(loop_of()._core.subject, data, **options)


def test_weights_that_are_not_made_yet_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu", plan="plain")
    with pytest.raises(BadArgument, match="first batch decides"):
        largest_batch(loop._core.subject, (torch.zeros(4, 3), torch.zeros(4, 1)))


Pair = namedtuple("Pair", ["x", "names"])


@dataclass
class Sample:
    x: Tensor
    scale: float


@pytest.mark.parametrize("wanted", [1, 2, 3, 7])
def test_nested_batches_keep_their_form(wanted: int) -> None:
    rows = [[0, 1, 2][i % 3] for i in range(wanted)]
    x = torch.tensor([[1, 2], [3, 4], [5, 6]])
    encoding = UserDict({"ids": x, "shared": torch.ones(5)})
    batch = {
        "pair": Pair(x, ["a", "b", "c"]),
        "list": [x, "one word", 3],
        "sample": Sample(x.float(), 2.0),
        "encoding": encoding,
        "paths": ("p", "q", "r"),
        "scalar": torch.tensor(4.0),
    }
    made = rows_of(batch, 3, [n % 3 for n in range(wanted)])
    assert made["pair"].names == [["a", "b", "c"][row] for row in rows]
    assert made["paths"] == tuple("pqr"[row] for row in rows)
    for tensor in (made["pair"].x, made["list"][0], made["encoding"]["ids"]):
        assert torch.equal(tensor, x[rows])
    assert torch.equal(made["sample"].x, x[rows].float())
    assert made["list"][1:] == ["one word", 3]
    assert type(made["encoding"]) is UserDict
    assert made["encoding"]["shared"].shape == (5,)
    assert made["scalar"] == 4.0
    assert torch.equal(encoding["ids"], x), "the batch that was handed in is as it was"


def test_a_packed_sequence_is_refused() -> None:
    with pytest.raises(BadArgument, match="PackedSequence"):
        rows_of(pack_sequence([torch.ones(3), torch.ones(2)]), 2, [0, 1, 0, 1])


def test_the_record_goes_to_json_and_back_and_reads_as_a_table() -> None:
    tried = (Try(32, 1e-3, 2**20, True), Try(64, None, None, False), Try(48, 1.1e-3, 2**21, True))
    found = Largest(48, 32, tried, 2**30, "memory", 1.5)
    assert Largest.from_json(found.to_json()) == found
    words = str(found).splitlines()
    assert words[0] == "48 items fit, 49 do not; fastest with 32 (found in 1.50 s, with 1.0 GiB to use)"
    assert [line.split()[0] for line in words[2:]] == ["32", "48", "64"]
    assert "does not fit" in words[-1]


@contextmanager
def capped(bytes_: int) -> Iterator[None]:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(bytes_ / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def cnn() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


@pytest.mark.gpu
def test_on_a_gpu_what_was_found_fits_and_a_little_more_does_not() -> None:
    def steps(items: int) -> None:
        model = cnn().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        x, y = torch.randn(items, 3, 32, 32, device="cuda"), torch.zeros(items, dtype=torch.long, device="cuda")
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        torch.cuda.synchronize()

    with capped(2 * 2**30):
        model = cnn()
        optimizer = torch.optim.Adam(model.parameters())
        loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device="cuda", plan="plain")
        batch = (torch.randn(64, 3, 32, 32), torch.zeros(64, dtype=torch.long))
        begin = time.perf_counter()
        found = largest_batch(loop._core.subject, batch)
        assert time.perf_counter() - begin < 35
        assert found.reason == "memory"
        assert 0.9 * 2 * 2**30 < found.memory < 1.01 * 2 * 2**30
        del loop, model, optimizer
        gc.collect()
        torch.cuda.empty_cache()
        steps(int(found.items * 0.99))
        torch.cuda.empty_cache()
        with pytest.raises(torch.OutOfMemoryError):
            steps(int(found.items * 1.03) + 1)


@pytest.mark.gpu
def test_on_a_gpu_what_was_tried_is_no_part_of_the_peak() -> None:
    loop = loop_of(device="cuda")
    loop.step(tokens())
    before = torch.cuda.max_memory_allocated()
    largest_batch(loop._core.subject, tokens(), limit=40)
    assert torch.cuda.max_memory_allocated() <= before
