"""What `fit` leaves beside its checkpoints, and what it says when it is ended early."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotloop import Loop, Report
from hotloop.checkpoint.store import Store
from hotloop.errors import PlanWarning
from hotloop.report.runs import kept_in


def fit(folder: Path | None, epochs: int = 2, **options: Any) -> Report:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    loop = Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), device="cpu", plan="plain")
    data = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
    return loop.fit(DataLoader(data, batch_size=8), epochs=epochs, monitor=False, save=folder, **options)


def test_a_run_with_a_folder_leaves_its_page_and_its_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = fit(tmp_path / "a")
    assert "ended early" not in capfd.readouterr().err
    html = (tmp_path / "a" / "report.html").read_text()
    assert "Training of Linear" in html
    assert "How it learned" in html
    kept_data = Report.from_json(json.loads((tmp_path / "a" / "report.json").read_text()))
    assert (kept_data.epochs, kept_data.curve, kept_data.steps) == (report.epochs, report.curve, report.steps)
    (kept,), failed = kept_in(tmp_path)
    assert failed == []
    assert kept.run.kind == "train"
    assert kept.run.figures["training loss"] == pytest.approx(report.epochs[-1].loss)
    fit(tmp_path / "a", epochs=3, resume=True, progress=False)
    assert len(json.loads((tmp_path / "a" / "report.json").read_text())["epochs"]) == 3


def test_a_page_of_somebody_else_stays(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine")
    with pytest.warns(PlanWarning, match="stays as it is"):
        fit(tmp_path, progress=False)
    assert (tmp_path / "report.html").read_text() == "mine"
    assert not (tmp_path / "report.json").exists()


def test_a_page_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.warns(PlanWarning):
        assert len(fit(tmp_path, progress=False).epochs) == 2


def test_an_early_end_says_where_it_was_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path / "a", epochs=500, time_limit=0.2)
    told = " ".join(capfd.readouterr().err.split())
    assert "ended early: the time limit, at step" in told
    assert f"saved in {tmp_path / 'a'}" in told
    assert "resume=True" in told
    assert "Stopped by the time limit" in (tmp_path / "a" / "report.html").read_text()
    fit(None, epochs=500, time_limit=0.2)
    assert "nothing is on disk" in capfd.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize("epochs", [500, 1])
def test_a_second_ctrl_c_while_it_saves_is_a_line_and_costs_no_checkpoint(
    epochs: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Store.write

    def slow(*args: Any, **options: Any) -> Any:  # in the thread that writes, while the run waits for it
        for seconds in (0.1, 0.6):  # a busy machine may take a while from the first to the wait
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        return plain(*args, **options)

    monkeypatch.setattr(Store, "write", slow)
    report = fit(tmp_path, epochs, every="3 steps" if epochs > 1 else "1h")
    told = " ".join(capfd.readouterr().err.split())
    assert report.interrupted
    assert told.count("ended early: Ctrl-C, at step ") == told.count("resume=True") == 1
    assert "Traceback" not in told
    if epochs > 1 and f"still writing a checkpoint to {tmp_path}" in told:  # the first came in the middle of an epoch
        assert report.saved is not None
        assert f"saved in {tmp_path}" in told
    else:  # between two epochs, or at the end of the run
        assert f"a checkpoint is still being written to {tmp_path}" in told
    monkeypatch.undo()
    assert [path for path in tmp_path.iterdir() if path.name.startswith("step-")], "it was waited for"
    assert len(fit(tmp_path, max(2, report.steps // 4 + 1), resume=True, progress=False).epochs) >= 2
