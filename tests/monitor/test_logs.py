"""Logs: lines that survive a crash, and event files that TensorBoard itself reads."""

import builtins
import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from hotloop.errors import BadArgument, OutputError
from hotloop.monitor.logs import JsonLines, MissingTensorBoard, TensorBoard, open_log, read_lines, scalars
from hotloop.monitor.reading import Gpu, Host, Reading

READING = Reading(
    100.0,
    Host(name="box", cpu=12.5, memory_used=2**40),
    (Gpu(0, "H200", utilisation=97.0, memory_used=2**30, throttled=()), Gpu(1, "H200", uuid="GPU-abc", power=70.0)),
)


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
    assert list(read_lines(path)) == [{"time": 7.5, "step": 3, "loss": 0.5, "items_per_second": 2.0, "unknown": None}]
    log.write({"loss": math.nan, "rate": math.inf}, step=4)
    log.append(READING.to_json())
    log.close()
    _, second, third = read_lines(path)
    assert (second["loss"], second["rate"]) == (None, None)
    assert second["time"] > 1e9
    assert Reading.from_json(third) == READING
    assert "NaN" not in path.read_text()


def test_a_log_goes_on_where_it_was(tmp_path: Path) -> None:
    for step in range(3):
        log = JsonLines(tmp_path / "run.jsonl")
        log.write({"loss": 1.0}, step=step)
        log.close()
    assert [line["step"] for line in read_lines(tmp_path / "run.jsonl")] == [0, 1, 2]


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


def test_a_killed_process_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    code = (
        "import os, sys; from hotloop.monitor.logs import JsonLines\n"
        "log = JsonLines(sys.argv[1])\n"
        "for step in range(50): log.write({'loss': 1.0}, step=step)\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=120)
    assert [line["step"] for line in read_lines(path)] == list(range(50))


def test_several_threads_and_writers_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    one, other = JsonLines(path), JsonLines(path)

    def fill(log: JsonLines, first: int) -> None:
        for step in range(first, first + 200):
            log.write({"loss": 1.0, "rate": 2.0}, step=step)

    threads = [threading.Thread(target=fill, args=(log, k * 200)) for k, log in enumerate([one, one, other])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.close()
    other.close()
    assert sorted(line["step"] for line in read_lines(path)) == list(range(600))


def test_what_cannot_be_logged(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "run.jsonl")
    with pytest.raises(BadArgument, match="item"):
        log.write({"loss": torch.tensor(1.0)}, step=1)
    with pytest.raises(BadArgument, match="time"):
        log.write({"time": 1.0}, step=1)
    log.close()
    assert list(read_lines(tmp_path / "run.jsonl")) == []


def test_places_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        JsonLines(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        JsonLines(tmp_path / "file" / "run.jsonl")
    with pytest.raises(OutputError, match="cannot write"):
        TensorBoard(tmp_path / "file" / "events")
    with pytest.raises(BadArgument, match="cannot read"):
        list(read_lines(tmp_path / "missing.jsonl"))


def test_a_file_that_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("a rose\nis a rose\n")
    with pytest.raises(BadArgument, match="holds no JSON lines"):
        list(read_lines(path))
    path.write_text("[" * 100_000)
    assert list(read_lines(path)) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said() -> None:
    log = JsonLines("/dev/full")
    with pytest.raises(OutputError, match="No space left"):
        log.write({"loss": 1.0}, step=1)
    log.close()


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


def test_without_tensorboard_the_line_to_install_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("tensorboard", "torch.utils.tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def missing(name: str, *rest: object, **more: object) -> object:
        if name.startswith("tensorboard"):
            raise ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingTensorBoard, match="pip install tensorboard"):
        TensorBoard(tmp_path / "events")


def test_a_log_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines, events = open_log("run.jsonl"), open_log("tensorboard")
    assert isinstance(lines, JsonLines)
    assert isinstance(events, TensorBoard)
    assert events.folder.parent == Path("runs")
    lines.close()
    events.close()
    with pytest.raises(BadArgument, match="tensorboard"):
        open_log("wandb")


def test_lines_are_plain_json(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "run.jsonl")
    log.write({"loss": 1}, step=1, time=2.0)
    log.close()
    assert (tmp_path / "run.jsonl").read_text() == '{"time":2.0,"step":1,"loss":1}\n'
    json.loads((tmp_path / "run.jsonl").read_text())
