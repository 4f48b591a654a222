"""`hotloop evaluate` and the person's own file, as a person runs it."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from .conftest import Run

pytestmark = pytest.mark.usefixtures("light_heap")
MINE = """
import torch
from torch import nn

import hotloop

x = torch.eye(4)


def build():
    model = nn.Linear(4, 4)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), plan="plain")
    held_out = [(x, torch.tensor([0, 1, 2, 0]))]
    return loop, [(x, torch.arange(4))], {"validate": held_out, "metrics": {"accuracy": hotloop.metrics.accuracy}}


def short():
    return build()[:2]


def changed():
    loop, loader, _ = build()
    return loop, loader, {"device_transform": lambda batch: batch}
"""


VERB = ("evaluate",)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    torch.save({"weight": 9 * torch.eye(4), "bias": torch.zeros(4)}, tmp_path / "eye.pt")
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "other.pt")
    monkeypatch.setenv("HOTLOOP_DEVICE", "cpu")


def test_weights_are_measured_on_what_is_held_out(run: Run) -> None:
    code, out, err = run("mine.py:build", "--weights", "eye.pt")
    assert code == 0, err
    assert "validation data" in out
    assert "accuracy  75.0%" in out
    code, out, err = run("mine.py:build", "--weights", "eye.pt", "--json")
    found = json.loads(out)
    assert (found["weights"], found["held_out"], found["metrics"]["accuracy"]) == ("eye.pt", True, 0.75)
    assert found["metrics"]["loss"] == pytest.approx(9 / 4, rel=0.01)
    assert "HOTLOOP_DEVICE asks for cpu" in err


def test_without_data_held_out_it_is_the_loader_and_says_so(run: Run) -> None:
    code, out, err = run("mine.py:short", "-w", "eye.pt")
    assert code == 0, err
    assert "data that it trains on" in out
    assert "loss  0.0" in out


MISTAKES = {
    "no function": (("eye.pt",), "eye.pt names no function"),
    "no weights": (("mine.py:build", "-w", "none"), "none is not there"),
    "other weights": (("mine.py:build", "-w", "other.pt"), "do not fit the model"),
    "best of nothing": (("mine.py:build", "--best"), "--best without --weights"),
    "only what a transform changes": (("mine.py:changed",), 'there is no "validate"'),
}


@pytest.mark.parametrize(("args", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_clear_message(run: Run, args: tuple[str, ...], words: str) -> None:
    run(*args).assert_told(words)
