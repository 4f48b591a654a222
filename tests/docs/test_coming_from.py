"""The pages for those who come from another library: both scripts of a page run and train alike."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

FOLDER = Path(__file__).parents[2] / "docs" / "coming-from"
PAGES = ("lightning", "accelerate", "trainer")


def scripts_of(page: str) -> tuple[str, str, list[str]]:
    """What both sides begin with, the script of the other library, and those of hotloop."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    before, theirs, ours, _ = re.split(r"^## ", text, flags=re.MULTILINE)
    shared, other, own = (re.findall(r"^```python\n(.*?)^```", part, re.M | re.S) for part in (before, theirs, ours))
    return shared[0], other[0], own


def run(*scripts: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "script"}
    for code in scripts:
        exec(compile(code, "<coming from>", "exec"), names)  # noqa: S102  # the page is our own
    return names


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU, and where files may be written."""
    monkeypatch.setenv("HOTLOOP_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)


@contextmanager
def among_others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where the other library sees no GPU, and its warnings are its own affair."""
    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        yield


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)


def test_there_is_a_test_for_every_page() -> None:
    assert sorted(file.stem for file in FOLDER.iterdir()) == sorted(PAGES)


@pytest.mark.parametrize("page", ["lightning", "trainer"])
def test_the_script_with_hotloop_trains_evaluates_and_saves(page: str) -> None:
    shared, _, (script,) = scripts_of(page)
    report = run(shared, script)["report"]
    assert report.steps == report.saved == 12
    assert report.epochs[-1].loss < report.epochs[0].loss
    assert set(report.epochs[-1].metrics) == {"loss", "accuracy"}


def test_the_script_with_a_loop_of_ones_own_and_the_one_with_fit() -> None:
    shared, _, (script, fit) = scripts_of("accelerate")
    names = run(shared, script)
    assert names["loop"].steps == 12
    assert names["losses"][-1] < names["losses"][0]
    whole = run(shared, script.split("losses = []")[0], fit)
    assert [epoch.loss for epoch in whole["report"].epochs] == pytest.approx(names["losses"])
    assert whole["report"].epochs[-1].metrics["accuracy"] == pytest.approx(names["accuracy"])
    assert_same_weights(whole["network"], names["network"])


def test_lightning_trains_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    with among_others(monkeypatch):
        pytest.importorskip("lightning")
        shared, script, (own,) = scripts_of("lightning")
        shared = shared.replace(", shuffle=True", "")
        theirs = run(shared, script)
    ours = run(shared, own)
    found, last = theirs["trainer"].callback_metrics, ours["report"].epochs[-1]
    assert last.loss == pytest.approx(float(found["train_loss"]), rel=1e-4)
    assert last.metrics == pytest.approx({name: float(found[name]) for name in ("loss", "accuracy")}, rel=1e-4)
    assert_same_weights(ours["network"], theirs["network"])


def test_accelerate_trains_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    with among_others(monkeypatch):
        pytest.importorskip("accelerate")
        shared, script, (own, _) = scripts_of("accelerate")
        theirs = run(shared, script)
        theirs["accelerator"].free_memory()
    ours = run(shared, own)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert ours["accuracy"] == pytest.approx(theirs["accuracy"])
    assert_same_weights(ours["network"], theirs["network"])


def in_order(trainer: Any) -> DataLoader[Any]:
    return DataLoader(trainer.train_dataset, trainer.args.per_device_train_batch_size)


def test_the_trainer_of_hugging_face_trains_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    with among_others(monkeypatch):
        pytest.importorskip("accelerate")  # which it needs
        transformers = pytest.importorskip("transformers")
        monkeypatch.setattr(transformers.Trainer, "get_train_dataloader", in_order)
        shared, script, (own,) = scripts_of("trainer")
        theirs = run(shared, script)
    ours = run(shared, own.replace(", shuffle=True", ""))
    history = theirs["trainer"].state.log_history
    losses = [each["loss"] for each in history if "loss" in each]
    scores = [(each["eval_loss"], each["eval_accuracy"]) for each in history if "eval_loss" in each]
    epochs = ours["report"].epochs
    assert [epoch.loss for epoch in epochs] == pytest.approx(losses, rel=1e-3)
    assert [epoch.metrics["loss"] for epoch in epochs] == pytest.approx([loss for loss, _ in scores], rel=1e-3)
    assert [epoch.metrics["accuracy"] for epoch in epochs] == pytest.approx([right for _, right in scores])
    assert_same_weights(ours["model"], theirs["model"])
