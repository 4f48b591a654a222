"""A benchmark measures everyone in turns, and goes on without those who fail."""

import json
import sys
from collections.abc import Iterator

import pytest
import torch

from harness.contestants import Started, contestants
from harness.records import Benchmark
from harness.running import Setup, race, run
from harness.workloads import TrainingParts, workload
from hotloop.errors import BadArgument

from .racing import CPU

pytestmark = pytest.mark.usefixtures("light_heap")


class Paced:
    """A contestant that claims a second for an epoch, and remembers its turns."""

    turns: list[str] = []  # noqa: RUF012

    def __init__(self, name: str, *, memory: Iterator[bool] | None = None) -> None:
        self.name, self.memory = name, memory

    def __call__(self, parts: TrainingParts, device: torch.device) -> Started:
        self.turns.append(f"{self.name} starts")
        if self.memory is not None and not next(self.memory):
            raise torch.OutOfMemoryError("too large\nfor this GPU")
        return Started(self.run, "by magic")

    def run(self, epochs: int) -> float:
        self.turns.append(f"{self.name} {epochs}")
        return float(epochs)


@pytest.fixture(autouse=True)
def _no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Paced, "turns", [])


def test_they_take_turns_and_the_first_epoch_is_not_timed() -> None:
    work = workload("mlp", "cpu", quick=True)
    done = race(work, {"a": Paced("a"), "b": Paced("b")}, CPU, repeats=2)
    assert done.failures == []
    assert Paced.turns == ["a starts", "a 1", "b starts", "b 1", "a 2", "b 2", "a 2", "b 2"]
    first = done.scores[0]
    assert (first.contestant, first.rate, first.low, first.high, first.repeats) == ("a", 256, 256, 256, 2)
    assert (first.steps, first.unit, first.device, first.note) == (8, "rows", "cpu", "by magic")
    assert first.whole > 0
    assert first.flops is not None
    assert first.traffic is not None
    assert first.peak_memory is None


def test_a_short_repeat_is_lengthened_until_it_can_be_timed() -> None:
    work = workload("mlp", "cpu", quick=True)
    done = race(work, {"a": Paced("a")}, CPU, repeats=1, least=9)
    assert Paced.turns[2:] == ["a 9", "a 2"]  # as few calls as may be, and longer than 9 seconds together
    assert done.scores[0].rate == 256
    assert done.scores[0].steps == 44


def test_who_fails_is_named_with_the_reason_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(parts: TrainingParts, device: torch.device) -> Started:
        raise ValueError("no wheels\nat all")

    monkeypatch.setitem(sys.modules, "accelerate", None)
    told: list[str] = []
    racers = {"broken": broken, **contestants(["accelerate", "tutorial"])}
    done = race(workload("mlp", "cpu", quick=True), racers, CPU, repeats=1, least=0, tell=told.append)
    assert [score.contestant for score in done.scores] == ["tutorial"]
    assert done.failures == [
        "mlp on cpu: broken: ValueError: no wheels",
        "mlp on cpu: accelerate: accelerate is not installed (fix: pip install accelerate)",
    ]
    assert any("rows per second" in line for line in told)


def test_who_does_not_fit_beside_the_others_runs_alone_after_them() -> None:
    large, huge = Paced("large", memory=iter([False, True])), Paced("huge", memory=iter([False, False]))
    done = race(workload("mlp", "cpu", quick=True), {"large": large, "huge": huge, "b": Paced("b")}, CPU, repeats=1)
    assert done.failures == ["mlp on cpu: huge: OutOfMemoryError: too large"]
    turns = [turn for turn in Paced.turns if not turn.startswith("huge")]
    assert turns == ["large starts", "b starts", "b 1", "b 2", "large starts", "large 1", "large 2"]
    assert [score.contestant for score in done.scores] == ["b", "large"]


def test_a_whole_benchmark_survives_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    setup = Setup(("gpt2", "mlp"), (CPU,), contestants(["tutorial", "hotloop"], plan_for=1), 2, quick=True)
    done = run(setup, command="python -m harness")
    assert [(score.workload, score.contestant) for score in done.scores] == [("mlp", "tutorial"), ("mlp", "hotloop")]
    assert [drawn.workload for drawn in done.curves] == ["mlp"]
    assert done.failures == ("gpt2 on cpu: transformers is not installed (fix: pip install transformers)",)
    assert set(done.ceilings["cpu"]) == {"fp32", "bytes"}
    assert {"torch", "python", "hotloop"} <= set(done.versions)
    assert Benchmark.from_json(json.loads(json.dumps(done.to_json(), allow_nan=False))) == done


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(BadArgument, match="repeats=0"):
        Setup(("mlp",), (CPU,), {}, repeats=0)
