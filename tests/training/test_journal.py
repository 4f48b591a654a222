"""A run is watched and logged, and neither can harm it."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotloop import Loop, Report
from hotloop.errors import HotloopError, PlanWarning
from hotloop.monitor.logs import read_lines


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine is not a driver that hangs: the last reading is waited for."""
    monkeypatch.setattr("hotloop.monitor.watching.LAST_READING", 120.0)


def loop_of(task: Any) -> Loop:
    torch.manual_seed(0)
    model = nn.Linear(task.inputs.shape[1], 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain")


def test_the_report_tells_what_the_run_asked_of_the_hardware(task) -> None:
    report = loop_of(task).fit(task.loader(16), epochs=2, progress=False)
    assert report.load is not None
    assert report.load.samples >= 2, "one at the beginning and one at the end, however short it was"
    assert 0 < report.load.seconds <= report.seconds
    assert report.load.gpus == (), "it ran on a CPU"
    assert report.watched == 2 * len(task.inputs)
    assert Report.from_json(report.to_json()) == report
    assert not any(thread.name == "hotloop watch" for thread in threading.enumerate())


def test_nobody_looks_where_that_is_not_wanted(task) -> None:
    assert loop_of(task).fit(task.loader(16), progress=False, monitor=False).load is None


@pytest.mark.parametrize("monitor", [True, False])
def test_losses_and_readings_are_in_one_file(task, tmp_path: Path, monitor: bool) -> None:
    loop = loop_of(task)
    log = tmp_path / "new" / "run.jsonl"
    options = {"validate": task.loader(16), "progress": False, "log": log, "monitor": monitor}
    report = loop.fit(task.loader(16), epochs=3, **options)
    lines = list(read_lines(log))
    ends = [line for line in lines if "epoch/loss" in line]
    assert [(line["epoch"], line["epoch/loss"]) for line in ends] == [(e.number, e.loss) for e in report.epochs]
    assert [line["validation/loss"] for line in ends] == [e.metrics["loss"] for e in report.epochs]
    assert ends[-1]["step"] == loop.steps
    assert any("items per second" in line for line in lines)
    assert any("host/cpu" in line for line in lines) == monitor


def test_tensorboard_gets_the_same_numbers(task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    report = loop_of(task).fit(task.loader(16), epochs=3, progress=False, log="tensorboard")
    (folder,) = {file.parent for file in tmp_path.rglob("events.*")}
    told = EventAccumulator(str(folder)).Reload()
    losses = [event.value for event in told.Scalars("epoch/loss")]
    assert losses == pytest.approx([epoch.loss for epoch in report.epochs], rel=1e-6)


class Broken:
    """A log on a disk that fills up."""

    def __init__(self) -> None:
        self.closed = False

    def write(self, numbers: Mapping[str, float | None], *, step: int, time: float | None = None) -> None:
        raise OSError("no space left")

    def close(self) -> None:
        self.closed = True


def test_a_log_that_breaks_is_told_once_and_ends_no_run(task) -> None:
    log = Broken()
    with pytest.warns(PlanWarning, match="no space left") as told:
        report = loop_of(task).fit(task.loader(16), epochs=3, progress=False, log=log, monitor=False)
    assert len(told) == 1
    assert len(report.epochs) == 3
    assert not log.closed, "whoever made it closes it"


def test_a_log_that_cannot_be_opened_is_told_before_anything_is_trained(task, tmp_path: Path) -> None:
    loop = loop_of(task)
    (tmp_path / "file").write_text("")
    with pytest.raises(HotloopError):
        loop.fit(task.loader(16), progress=False, log=tmp_path / "file" / "run.jsonl")
    assert loop.steps == 0
    with pytest.raises(HotloopError, match="jsonl"):
        loop.fit(task.loader(16), progress=False, log="run.csv")


@pytest.mark.gpu
def test_a_gpu_at_work_is_seen() -> None:
    model = nn.Linear(2048, 2048)
    loop = Loop(model, torch.optim.SGD(model.parameters(), 1e-6), nn.MSELoss(), device="cuda", plan="plain")
    batches = [(torch.randn(4096, 2048, device="cuda"), torch.randn(4096, 2048, device="cuda"))] * 200
    report = loop.fit(batches, epochs=40, progress=False)
    assert report.load is not None
    (gpu,) = report.load.gpus
    assert gpu.utilisation is not None
    assert gpu.utilisation > 10
    assert gpu.memory_peak is not None
    assert report.load.joules is not None
    assert report.load.joules > 0
