"""What hotloop does beside a step, counted from outside: expensive looks at rng states are rare."""

import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

import hotloop

STEPS = 300


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts how often somebody reads the rng state of NumPy or Python, which takes as long as a small step."""
    count = 0

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return call(*args, **options)

        return counted

    monkeypatch.setattr(np.random, "get_state", counting(np.random.get_state))
    monkeypatch.setattr(random, "getstate", counting(random.getstate))
    return lambda: count


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "bf16"}, {"accumulate": 2}, {"clip_norm": 1.0}, {"plan": hotloop.Plan("cpu", fused=True)}],
    ids=["plain", "bf16", "accumulate", "clip", "fused"],
)
def test_a_step_takes_no_full_look_at_rng_states(options: dict[str, Any], looks: Callable[[], int]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    batch = (torch.randn(8, 4), torch.randn(8, 1))
    options = {"plan": "plain", **options}
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss(), device="cpu", **options)
    for given in loop.batches([batch] * STEPS):
        loop.step(given)
    assert looks() <= 72  # a few looks at the start and one in 257 later, each at two generators


def test_an_evaluation_takes_no_full_look_at_rng_states(looks: Callable[[], int]) -> None:
    model = nn.Linear(4, 1)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss(), device="cpu", plan="plain")
    loop.evaluate([(torch.randn(8, 4), torch.randn(8, 1))] * STEPS)
    assert looks() <= 24


class Texts(Dataset[Any]):
    def __init__(self, words: Any) -> None:
        self.words = words

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> list[Tensor]:
        return [torch.full((4,), index / 300), torch.ones(1)]


def _calls_with(words: Any) -> int:
    """Python's function calls in a run whose model, objective and dataset hold these words."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    model.words = words

    def objective(model: nn.Module, batch: list[Tensor]) -> Tensor:
        assert words
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def work() -> None:
        loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), objective=objective, device="cpu")
        loop.fit(DataLoader(Texts(words), 2), epochs=2, progress=False)

    return _calls(work)


def _calls(work: Callable[[], object]) -> int:
    calls = itertools.count()
    sys.setprofile(lambda frame, event, argument: next(calls) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    return next(calls)


@pytest.mark.parametrize("call", ["predict", "evaluate"])
def test_each_batch_of_a_long_evaluation_costs_the_same(call: str) -> None:
    model = nn.Linear(4, 2)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), device="cpu")
    work = getattr(loop, call)
    batch = (torch.randn(2, 4), torch.tensor([0, 1]))
    work([batch] * 10)
    few, many = (_calls(lambda number=number: work([batch] * number)) for number in (100, 500))
    assert many < 6 * few


def _numbered(words: list[str]) -> dict[str, int]:
    return {word: number for number, word in enumerate(words)}


def test_nobody_goes_through_a_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.tune.course.WORTH_ON_CPU", 100)
    words = [f"word {number}" for number in range(50_000)]
    _calls_with(words[:100])  # what is imported and cached by the first
    few = _calls_with(words[:100])
    for kind in (list, _numbered, dict.fromkeys, set):
        assert _calls_with(kind(words)) < few + 10_000, kind


class Operations(TorchDispatchMode):
    """Counts the operations that PyTorch carries out, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("aten."):  # not the marks of the profiler
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"clip_norm": 1.0}], ids=["plain", "bf16", "clip"])
@pytest.mark.parametrize("norm", [False, True], ids=["without buffers", "with buffers"])
def test_a_step_carries_out_the_operations_of_a_loop_by_hand(norm: bool, options: dict[str, Any]) -> None:
    """And no others, but for one copy of the buffers that a step writes."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.ReLU(), nn.Linear(8, 1))
    batch = [torch.randn(8, 4), torch.randn(8, 1)]
    optimizer, criterion = torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss()
    loop = hotloop.Loop(model, optimizer, criterion, device="cpu", plan="plain", **options)
    by_hand, ours = Operations(), Operations()
    for number, given in enumerate(loop.batches([batch] * 20)):
        with ours if number >= 10 else nullcontext():
            loop.step(given)
    for _ in range(10):
        with by_hand:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled="precision" in options):
                loss = criterion(model(batch[0]), batch[1])
            loss.backward()
            if "clip_norm" in options:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss.detach_().item()  # which a person reads, and `Loop` on a CPU too
    more = ours.seen - by_hand.seen
    copies = Counter({name: count for name, count in more.items() if "copy" in name or name.startswith("aten.detach")})
    assert more == copies
    assert sum(copies.values()) <= (10 * 3 if norm else 0), copies
    assert not by_hand.seen - ours.seen
