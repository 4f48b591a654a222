"""Whole runs of `fit` are counted from the `Loop` to the report, and compared with the tutorial's loop."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness import end_to_end
from harness.end_to_end import CACHES, WholeRuns, pace_of, run_end_to_end
from harness.packages import MissingPackage
from harness.records import DEFAULT, Benchmark, EndToEnd
from harness.workloads import END_TO_END, UNSEEN, WORKLOADS, Workload, workload
from harness.workloads.plans import plans_by_hand
from hotloop.errors import BadArgument

from ..thorough import THOROUGH, some
from .racing import CPU, needs_packages_of

pytestmark = pytest.mark.usefixtures("light_heap")
SHORT = WholeRuns(("mlp",), (CPU,), lengths=(5.0,), tutorial=5.0, peers=("careful",), quick=True)


NAMES = [*END_TO_END, *UNSEEN]
# By all contestants or by hand, in `test_contestants.py`; the LSTM below, to rounding.
TRAINED = ("cnn", "resnet18", "dcgan", "bert", "lstm")


def only_row(setup: WholeRuns) -> EndToEnd:
    done = run_end_to_end(setup)
    assert done.failures == ()
    (row,) = done.end_to_end
    return row


@pytest.mark.parametrize("name", some(NAMES, [name for name in NAMES if name not in TRAINED]))
def test_every_workload_is_timed_end_to_end_and_trained_like_the_tutorials(name: str) -> None:
    needs_packages_of(name)
    lengths = (1.0, 20.0) if THOROUGH else (1.0, 10.0) if name == "mlp" else (10.0,)
    row = only_row(replace(SHORT, workloads=(name,), lengths=lengths))
    assert row.failures == ()
    assert row.rate > 0
    assert row.peers["careful"] > 0
    assert [(run.given, run.length) for run in row.runs] == [(DEFAULT, length / 100) for length in lengths]
    for run in row.runs:
        assert run.seconds > 0
        assert run.gain == pytest.approx(run.tutorial / run.seconds)
        assert len(run.losses) == run.epochs
        compared = row.last_losses(run)
        if compared is not None:
            _, ours, theirs = compared
            assert ours == pytest.approx(theirs, rel=0.05)


def test_in_eager_fp32_the_losses_are_those_of_the_tutorial_to_rounding() -> None:
    row = only_row(replace(SHORT, workloads=("lstm",), tutorial=50.0))
    assert row.losses
    run = row.default(0.05)
    common = min(len(row.losses), len(run.losses))
    assert run.losses[:common] == pytest.approx(row.losses[:common], rel=1e-5)  # with the same dropout


def test_plans_by_hand_run_in_the_same_way_and_what_is_refused_says_why() -> None:
    needs_packages_of("bert")
    row = only_row(replace(SHORT, workloads=("bert",), plans=True))
    best = row.best_by_hand(0.05)
    assert best.given in {repr(plan) for plan in plans_by_hand("bert", CPU)}
    (refused,) = row.failures  # a ragged loader's data is not kept on the device
    assert "resident" in refused
    assert "collate_fn" in refused


def test_every_run_has_new_caches_and_a_warm_one_those_of_the_run_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in CACHES[1:]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(CACHES[0], str(tmp_path / "mine"))
    seen: list[list[str]] = []

    def watched(setup: WholeRuns) -> EndToEnd:
        def look(_: str) -> None:
            seen.append([os.environ.get(name, "") for name in CACHES])

        (row,) = run_end_to_end(setup, tell=look).end_to_end
        return row

    row = watched(replace(SHORT, lengths=(3.0, 5.0), warm=True))
    assert [(run.length, run.warm) for run in row.runs] == [(0.03, False), (0.03, True), (0.05, False), (0.05, True)]
    first, second, third, fourth = seen[-4:]
    assert first == second
    assert third == fourth
    assert not set(first) & set(third)
    assert not any(Path(folder).exists() for folder in (*first, *third))
    assert not (tmp_path / "mine").exists()
    assert os.environ[CACHES[0]] == str(tmp_path / "mine")
    assert not any(name in os.environ for name in CACHES[1:])


def test_a_part_that_fails_is_recorded_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "accelerate", None)
    kept: list[Benchmark] = []
    setup = replace(SHORT, workloads=("gpt2", "mlp"), peers=("accelerate", "careful", "trainer"))

    def missing(*_: object) -> Workload:
        raise MissingPackage("transformers is not installed", fix="pip install transformers")

    monkeypatch.setitem(WORKLOADS, "gpt2", missing)
    done = run_end_to_end(setup, keep=kept.append)
    assert done.failures == ("gpt2 on cpu: transformers is not installed (fix: pip install transformers)",)
    (row,) = done.end_to_end
    assert row.failures == ("mlp on cpu: accelerate: accelerate is not installed (fix: pip install accelerate)",)
    assert list(row.peers) == ["careful"]  # the Trainer is not for it, which is no failure
    assert row.default(0.05) is not None
    assert len(kept) > 4
    assert kept[-1] == done
    assert Benchmark.from_json(json.loads(json.dumps(done.to_json(), allow_nan=False))) == done


class Clock:
    """Time that passes in steps."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def steps(self, work: Workload, start: float = 0.0, step: float = 1.0) -> Iterator[list[torch.Tensor]]:
        """Each epoch takes a while to begin; the loss is the number of the step."""
        number = 0
        while True:
            self.now += start
            for _ in range(work.steps):
                self.now += step
                number += 1
                yield [torch.tensor(float(number)), torch.tensor(1.0)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(end_to_end, "time", SimpleNamespace(perf_counter=made.perf_counter))
    return made


def test_whole_epochs_are_timed_with_what_each_begins_with(clock: Clock) -> None:
    work = workload("cnn", "cpu", quick=True)  # batches of 32, 32 and 16
    pace = pace_of(clock.steps(work, start=2.0), work, CPU, 19)
    assert (pace.items, pace.seconds) == (3 * 80, 15.0)
    assert pace.losses == pytest.approx([1 + (32 * 1 + 32 * 2 + 16 * 3) / 80, 1 + (32 * 4 + 32 * 5 + 16 * 6) / 80, 8.8])


def test_an_epoch_that_is_too_long_is_timed_in_whole_steps(clock: Clock) -> None:
    work = workload("cnn", "cpu", quick=True)
    pace = pace_of(clock.steps(work, step=3.0), work, CPU, 5)
    assert (pace.items, pace.seconds, pace.losses) == (64, 6.0, ())


def test_steps_that_warm_up_are_not_timed(clock: Clock) -> None:
    work = workload("cnn", "cpu", quick=True)
    pace = pace_of(clock.steps(work, start=100.0), work, CPU, 1, skip=1)
    assert (pace.items, pace.seconds) == (32 + 16, 2.0)


@pytest.mark.parametrize("name", [*END_TO_END, *UNSEEN])
def test_plans_are_written_down_for_every_workload(name: str) -> None:
    plans = plans_by_hand(name, torch.device("cuda"))
    assert len(set(plans)) == len(plans) >= 3
    assert any(plan.precision == "bf16" for plan in plans)
    assert all(plan.device == "cuda" for plan in plans)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(BadArgument, match="nan seconds"):
        replace(SHORT, lengths=(10.0, float("nan")))
    with pytest.raises(BadArgument, match="no length"):
        replace(SHORT, lengths=())
    with pytest.raises(BadArgument, match="lightning"):
        run_end_to_end(replace(SHORT, peers=("lightening",)))
    with pytest.raises(BadArgument, match="no plans"):
        plans_by_hand("vgg", CPU)
