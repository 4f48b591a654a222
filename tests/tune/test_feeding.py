"""A run that waits for its loader gets more workers, with the same batches in the same order."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hotloop
from hotloop.data import WorkersAdvice
from hotloop.tune import feeding
from hotloop.tune.feeding import Feeding


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Items that take their time."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.003)
        x = torch.full((4,), float(index))
        return x, x[:1] / 160


def fitted(plan: Any, workers: int, epochs: int = 2) -> tuple[hotloop.Loop, hotloop.Report, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    seen: list[Tensor] = []

    def objective(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch[0][:, 0].clone())
        return nn.functional.mse_loss(model(batch[0] / 160), batch[1])

    loader = DataLoader(Slow(), 8, shuffle=True, num_workers=workers)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), objective=objective, device="cpu", plan=plan)
    report = loop.fit(loader, epochs=epochs, progress=False)
    return loop, report, seen


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.data.worker_count.usable_cores", lambda root: 4)
    monkeypatch.setattr(feeding, "WORTH_IT", 0.1)


@pytest.mark.usefixtures("four_cores")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # it knows how many cores there really are
def test_a_loader_that_is_waited_for_gets_more_workers() -> None:
    loop, report, seen = fitted("auto", 1)
    _, _, plain = fitted("plain", 1)
    assert loop.plan.workers == 4
    [first, *_] = [change for change in report.plans if "waits" in change.why]
    assert 0 < first.step < 20, "inside the first epoch"
    assert len(seen) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(seen, plain, strict=True))


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(("plan", "workers"), [(hotloop.Plan("cpu", workers=1), 1), ("plain", 1), ("auto", 0)])
def test_workers_that_were_asked_for_and_loaders_without_stay_as_they_are(plan: Any, workers: int) -> None:
    loop, _, _ = fitted(plan, workers, epochs=1)
    assert (loop.plan.workers or workers) == workers


class Clock:
    """A stream that tells what it is told to tell."""

    resident, source, loader, workers, batch_bytes = None, None, None, 2, 100

    def __init__(self) -> None:
        self.batches, self.waited, self.now = 0, 0.0, 0.0

    def step(self, seconds: float, waited: float) -> None:
        self.batches, self.waited, self.now = self.batches + 1, self.waited + waited, self.now + seconds


@pytest.mark.parametrize(
    ("seconds", "waited", "left", "asks"),
    [
        (1.0, 0.0, None, False),
        (1.0, 0.1, None, False),
        (1.0, 0.5, None, True),
        (0.01, 0.005, None, True),
        (0.01, 0.005, 1000, True),
        (0.01, 0.005, 10, False),  # no worker is started for a run that is nearly over
    ],
)
def test_waiting_is_judged_as_a_share_of_a_few_steps(
    seconds: float, waited: float, left: int | None, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, watched = Clock(), Feeding()
    monkeypatch.setattr(feeding.time, "perf_counter", lambda: stream.now)
    monkeypatch.setattr(feeding, "workers_for", lambda *given, **more: WorkersAdvice(4, 2, "because"))
    advice = []
    for _ in range(12):
        advice.append(watched.advice(stream, left))  # type: ignore[arg-type]
        stream.step(seconds, waited)
    assert any(advice) == asks


def test_a_loader_is_not_watched_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, watched = Clock(), Feeding()
    monkeypatch.setattr(feeding.time, "perf_counter", lambda: stream.now)
    for _ in range(feeding.MOST_BATCHES + 10):
        watched.advice(stream, None)  # type: ignore[arg-type]
        stream.step(1.0, 0.0)
    assert not watched.is_open
