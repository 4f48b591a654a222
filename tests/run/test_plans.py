"""The plans of a run: each change with its batch, in the report and the checkpoint, so that a run can be replayed."""

import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hotloop import Loop, Plan, Report
from hotloop.errors import MemoryWarning
from hotloop.levers.checkpointing import CheckpointingLever

from .conftest import at_step, signalled

BATCH, BATCHES = 16, 12


def batches(count: int = BATCHES) -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(count, BATCH, 6, generator=generator)
    return [(each, each[:, :3].argmax(1)) for each in inputs]


class Narrow(nn.Module):
    """A model for which memory is short for a while: with more items than `most`, from one call on to another."""

    def __init__(self, most: int, first: int, last: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.limits = (most, first, last)
        self.register_buffer("items", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        most, first, last = self.limits
        if first <= float(self.items) / BATCH < last and len(x) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if self.training and torch.is_grad_enabled():
            self.items += len(x)
        return self.layers(x)


def loop_of(model: nn.Module, plan: Any) -> Loop:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan=plan)


def weights(loop: Loop) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in loop.model.parameters()]


def replayed(report: Report, data: list[Any], plain: nn.Module) -> list[Tensor]:
    """The same run by hand: a loop for each stretch, with the plan that the report has for it."""
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    loop = None
    ends = [*(change.batch for change in report.plans[1:]), len(data)]
    for change, end in zip(report.plans, ends, strict=True):
        plan = Plan.from_json(change.plan)
        loop = Loop(plain, optimizer, nn.CrossEntropyLoss(), device="cpu", plan=plan)
        for batch in loop.batches(data[change.batch : end]):
            loop.step(batch)
    return weights(loop)


def test_a_run_without_changes_has_one_plan(tmp_path: Path) -> None:
    loop = loop_of(Narrow(16, 0, 0), "plain")
    report = loop.fit(batches(), progress=False)
    (only,) = report.plans
    assert (only.step, only.batch) == (0, 0)
    assert Plan.from_json(only.plan) == loop.plan
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize(("accumulate", "first"), [(1, 3), (2, 4)])
def test_a_run_is_replayed_from_its_plans_to_the_bit(accumulate: int, first: int) -> None:
    data = batches(80)
    loop = loop_of(Narrow(4, first, 8), Plan("cpu", accumulate=accumulate))
    with pytest.warns(MemoryWarning):
        report = loop.fit(data, progress=False)
    sizes = [(change.batch, change.plan["micro_batch"]) for change in report.plans]
    assert sizes[:2] == [(0, None), (first, 4)]
    assert len(sizes) > 2, "larger micro-batches were tried, once they were good for long"
    assert [change.step for change in report.plans] == [change.batch // accumulate for change in report.plans]
    assert all(change.why for change in report.plans)
    again = replayed(report, data, Narrow(16, 0, 0))
    assert all(torch.equal(a, b) for a, b in zip(weights(loop), again, strict=True))
    whole = loop_of(Narrow(16, 0, 0), Plan("cpu", accumulate=accumulate))
    whole.fit(data, progress=False)
    assert not all(torch.equal(a, b) for a, b in zip(weights(whole), again, strict=True)), "rounding is felt"


def test_a_resumed_run_has_the_plans_of_all_its_parts(tmp_path: Path) -> None:
    data = batches(80)
    report, life = None, 0
    while report is None or report.interrupted:
        loop = loop_of(Narrow(4, 3, 8), "plain")
        if life < 3:
            at_step(loop, (2, 4, 60)[life], signalled(signal.SIGTERM))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MemoryWarning)
            report = loop.fit(data, save=tmp_path, resume=True, progress=False)
        life += 1
    assert report.resumed == 3
    unbroken = loop_of(Narrow(4, 3, 8), "plain")
    with pytest.warns(MemoryWarning):
        expected = unbroken.fit(data, progress=False)
    assert report.plans == expected.plans
    assert all(torch.equal(a, b) for a, b in zip(weights(loop), weights(unbroken), strict=True))


class Slow:
    """An objective whose calls take some time, and are counted where nobody can see it."""

    def __init__(self, seconds: float, log: Path) -> None:
        self.seconds = seconds
        self.log = str(log)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(self.seconds)
        with Path(self.log).open("a") as file:
            file.write("x")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_a_run_that_decided_not_to_tune_does_not_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rest looks long enough now that each step is slower; the run goes on as it began."""
    monkeypatch.setattr("hotloop.tune.course.WORTH_A_PLAN", 1.0)
    data = batches(80)
    for life, (seconds, steps) in enumerate([(0.0, 20), (0.03, 20)]):
        model = Narrow(16, 0, 0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        log = tmp_path / f"calls {life}"
        loop = Loop(model, optimizer, objective=Slow(seconds, log), device="cpu")
        at_step(loop, steps, signalled(signal.SIGTERM))
        report = loop.fit(data, save=tmp_path / "run", resume=True, progress=False)
        assert report.interrupted
        assert report.resumed == life
        assert log.stat().st_size == steps, "no trials"
        assert report.tuning == 0
        assert len(report.plans) == 1


def test_a_run_that_was_tuned_is_not_when_it_is_resumed(tmp_path: Path) -> None:
    data = batches(30)

    def build() -> Loop:
        model = Narrow(16, 0, 0)
        return Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), device="cpu")

    first = build()
    found = first.tune(data, steps=20, progress=False)
    at_step(first, 10, signalled(signal.SIGTERM))
    before = first.fit(data, save=tmp_path, progress=False)
    again = build()
    report = again.fit(data, save=tmp_path, resume=True, progress=False)
    assert report.tuning == before.tuning
    assert again.tuning == found
    assert again.plan == first.plan == Plan.from_json(report.plans[0].plan)
    assert report.plans == before.plans


def test_a_plan_that_fails_halfway_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters())
    loop = Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain")
    batch = torch.randn(4, 3, 8, 8), torch.randint(2, (4,))
    loop.step(batch)
    switch = loop._core.switch
    switch.carry_out(replace(switch.step.plan, fused=True), "it is fused")
    apply = CheckpointingLever.apply

    def fails(lever: CheckpointingLever, *given: Any) -> Iterator[Any]:
        yield next(iter(apply(lever, *given)))
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(CheckpointingLever, "apply", fails)
    with pytest.raises(torch.OutOfMemoryError):
        switch.carry_out(replace(switch.step.plan, recompute=("0", "2")), "a test")
    assert (loop.plan.fused, loop.plan.recompute) == (True, ())
    assert optimizer.param_groups[0]["fused"]
    assert not any("forward" in vars(layer) for layer in model)
    loop.step(batch)
