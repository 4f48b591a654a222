"""Logs: lines that survive a crash, event files that TensorBoard itself reads, what W&B and MLflow are told."""

import json
import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hotloop.errors import BadArgument, OutputError
from hotloop.monitor.logs import (
    JsonLines,
    MissingLogger,
    MLflow,
    TensorBoard,
    WeightsAndBiases,
    open_log,
)
from hotloop.monitor.reading import Gpu, Host, Reading, scalars

READING = Reading(
    100.0,
    Host(name="box", cpu=12.5, memory_used=2**40),
    (Gpu(0, "H200", utilisation=97.0, memory_used=2**30, throttled=()), Gpu(1, "H200", uuid="GPU-abc", power=70.0)),
)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a log, without a line that a crash has cut."""
    found = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [each for each in found if isinstance(each, dict)]


def test_numbers_of_a_reading_have_names_that_stay() -> None:
    assert scalars(READING) == {
        "host/cpu": 12.5,
        "host/memory_used": 2**40,
        "gpu0/utilisation": 97.0,
        "gpu0/memory_used": 2**30,
        "gpu0/throttled": 0.0,
        "gpu1/power": 70.0,
    }
    assert (
        set(scalars(READING, ["abc"])) == set(scalars(READING, [1])) == {"host/cpu", "host/memory_used", "gpu1/power"}
    )


def test_lines_come_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.jsonl"
    log = JsonLines(path)
    log.write({"loss": 0.5, "items_per_second": np.float32(2.0), "unknown": None}, step=3, time=7.5)
    assert read_lines(path) == [{"time": 7.5, "step": 3, "loss": 0.5, "items_per_second": 2.0, "unknown": None}]
    log.write({"loss": math.nan, "rate": math.inf}, step=4)
    log.close()
    assert path.read_text().startswith('{"time":7.5,"step":3,"loss":0.5,')
    _, second = read_lines(path)
    assert (second["loss"], second["rate"]) == (None, None)
    assert second["time"] > 1e9
    assert "NaN" not in path.read_text()


def test_a_crash_costs_at_most_the_line_that_was_being_written(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = JsonLines(path)
    for step in range(3):
        log.write({"löss": step / 2}, step=step, time=1.0)
    log.close()
    whole = path.read_bytes()
    for kept in range(len(whole) + 1):
        path.write_bytes(whole[:kept])
        lines = whole[:kept].count(b"\n")
        steps = [line["step"] for line in read_lines(path)]
        assert steps[:lines] == list(range(lines))
        assert len(steps) <= lines + 1  # a line may lack nothing but its end
        log = JsonLines(path)
        log.write({"löss": 9.0}, step=9)
        log.close()
        assert [line["step"] for line in read_lines(path)] == [*steps, 9]


def test_several_threads_and_writers_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    one, other = JsonLines(path), JsonLines(path)

    def fill(log: JsonLines, first: int) -> None:
        for step in range(first, first + 200):
            log.write({"loss": 1.0, "rate": 2.0}, step=step)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(fill, [one, one, other], [0, 200, 400]))
    one.close()
    other.close()
    assert sorted(line["step"] for line in read_lines(path)) == list(range(600))


def test_what_cannot_be_logged_and_places_that_cannot_be_written(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "run.jsonl")
    with pytest.raises(BadArgument, match="item"):
        log.write({"loss": torch.tensor(1.0)}, step=1)
    with pytest.raises(BadArgument, match="time"):
        log.write({"time": 1.0}, step=1)
    log.close()
    assert read_lines(tmp_path / "run.jsonl") == []
    for kind, place in ((JsonLines, ""), (JsonLines, "run.jsonl/x.jsonl"), (TensorBoard, "run.jsonl/events")):
        with pytest.raises(OutputError, match="cannot write"):
            kind(tmp_path / place)
    if Path("/dev/full").exists():
        full = JsonLines("/dev/full")
        with pytest.raises(OutputError, match="No space left"):
            full.write({"loss": 1.0}, step=1)
        full.close()


def read_events(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        name: [(event.step, event.wall_time, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    log = TensorBoard(tmp_path / "events")
    log.write({"loss": 0.5, "unknown": None}, step=1, time=1000.5)
    log.write({"loss": 0.25, "items_per_second": 100}, step=2, time=1001.5)
    log.write(scalars(READING), step=2, time=READING.time)
    log.write({"unknown": None}, step=3)
    log.close()
    events = read_events(tmp_path / "events")
    assert events["loss"] == [(1, 1000.5, 0.5), (2, 1001.5, 0.25)]
    assert events["items_per_second"] == [(2, 1001.5, 100.0)]
    assert events["gpu0/utilisation"] == [(2, 100.0, 97.0)]
    assert "unknown" not in events


def test_a_log_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines, events = open_log("run.jsonl"), open_log("tensorboard")
    assert isinstance(lines, JsonLines)
    assert isinstance(events, TensorBoard)
    assert events.folder.parent == Path("runs")
    for log in (lines, events):
        log.close()
    for unknown in ("neptune", "run.csv"):
        with pytest.raises(BadArgument, match="tensorboard"):
            open_log(unknown)


# Weights & Biases and MLflow, by the calls that they document


class WandbRun:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.axis, self.history, self.finished = options, {}, [], False

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axis[name] = step_metric

    def log(self, data: dict[str, Any]) -> None:
        self.history.append(data)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("wandb")
    module.run = None
    module.init = lambda **options: WandbRun(options)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_the_numbers_over_the_steps_or_says_why_it_cannot_begin(wandb: Any) -> None:
    log = WeightsAndBiases(project="sprites")
    log.write({"loss": 0.5, "unknown": None}, step=3, time=7.5)
    log.write({"unknown": None}, step=4)
    log.write({"gpu0/utilisation": 97.0}, step=2)
    run = log._run
    assert run.options == {"project": "sprites"}
    assert run.axis == {"*": "step"}, "W&B drops what comes with an earlier step than its own"
    assert run.history == [{"loss": 0.5, "step": 3}, {"gpu0/utilisation": 97.0, "step": 2}]
    log.close()
    assert run.finished
    wandb.run = WandbRun({})
    log = open_log("wandb")
    log.write({"loss": 0.5}, step=3)
    log.close()
    assert wandb.run.history == [{"loss": 0.5, "step": 3}], "a run that is active is used"
    assert not wandb.run.finished

    def init() -> WandbRun:
        raise RuntimeError("No API key configured.")

    wandb.run, wandb.init = None, init
    with pytest.raises(OutputError, match=r"No API key configured\.\n  fix: .*WANDB_MODE=offline"):
        open_log("wandb")


class MlflowServer:
    """What the modules of MLflow share; the active run is one of a thread, as theirs is."""

    def __init__(self) -> None:
        self.local = threading.local()
        self.metrics: list[tuple[Any, ...]] = []
        self.batches: list[int] = []
        self.ended: list[str] = []
        self.fails = False
        self.answers = threading.Event()
        self.answers.set()

    def active_run(self) -> Any:
        return getattr(self.local, "run", None)

    def start_run(self, **options: Any) -> Any:
        self.local.run = SimpleNamespace(info=SimpleNamespace(run_id="r1"), options=options)
        return self.local.run

    def end_run(self) -> None:
        self.ended.append(self.local.run.info.run_id)
        self.local.run = None

    def set_terminated(self, run_id: str) -> None:
        self.ended.append(run_id)

    def log_batch(self, run_id: str, *, metrics: list[tuple[Any, ...]]) -> None:
        self.answers.wait(60)
        if self.fails:
            raise ConnectionError("the server is gone")
        assert run_id == "r1"
        self.batches.append(len(metrics))
        self.metrics += metrics


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> MlflowServer:
    server = MlflowServer()
    module, entities, tracking = (ModuleType(f"mlflow{name}") for name in ("", ".entities", ".tracking"))
    vars(module).update(active_run=server.active_run, start_run=server.start_run, end_run=server.end_run)
    vars(entities).update(Metric=lambda key, value, timestamp, step: (key, value, timestamp, step))
    vars(tracking).update(MlflowClient=lambda: server)
    for each in (module, entities, tracking):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return server


def test_mlflow_gets_the_numbers(mlflow: MlflowServer) -> None:
    log = MLflow(run_name="sprites")
    assert mlflow.active_run().options == {"run_name": "sprites"}
    log.write({"loss": 0.5, "unknown": None, "validation/top@5": 1.0}, step=3, time=7.5)
    log.write({"epoch": 1.0, "epoch/loss": 0.25}, step=4, time=8.0)
    log.close()
    assert mlflow.metrics == [
        ("loss", 0.5, 7500, 3),
        ("validation/top_5", 1.0, 7500, 3),
        ("epoch/number", 1.0, 8000, 4),
        ("epoch/loss", 0.25, 8000, 4),
    ]
    assert mlflow.ended == ["r1"]
    assert mlflow.active_run() is None
    mlflow.start_run()
    log = open_log("mlflow")
    log.write({"loss": 1.0}, step=1)
    log.close()
    assert len(mlflow.metrics) == 5
    assert mlflow.ended == ["r1"], "a run that is active is used and not ended"


def test_a_slow_server_of_mlflow_is_not_waited_for_and_what_it_did_not_take_is_said(mlflow: MlflowServer) -> None:
    mlflow.answers.clear()
    log = MLflow()
    for step in range(1200):
        log.write({"loss": 1.0, "rate": 2.0}, step=step)  # would never return
    assert mlflow.metrics == []
    mlflow.answers.set()
    log.close()
    assert [step for name, _, _, step in mlflow.metrics if name == "loss"] == list(range(1200))
    assert max(mlflow.batches) <= 1000, "more are refused in one request"
    mlflow.fails = True
    log = MLflow()
    log.write({"loss": 1.0}, step=1)
    with ThreadPoolExecutor(1) as another_thread, pytest.raises(ConnectionError, match="the server is gone"):
        another_thread.submit(log.close).result()
    assert mlflow.ended == ["r1"] * 2


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_without_a_package_the_line_to_install_it_is_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)  # which imports tensorboard
    for module in (None, ModuleType(name)):  # not there; a folder of that name, as W&B makes one
        monkeypatch.setitem(sys.modules, name, module)
        with pytest.raises(MissingLogger, match=f"pip install {name}"):
            open_log(name)
