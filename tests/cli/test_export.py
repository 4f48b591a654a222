"""`hotloop export`: the weights of a checkpoint as one file."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hotloop.checkpoint.store import Store

from .conftest import Run

VERB = ("export",)


def test_the_latest_or_the_best_becomes_a_file(run: Run, tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    for step, score in ((1, 0.1), (2, 0.2)):
        store.save(step, {"loop": {"model": {"weight": torch.full((2, 3), float(step))}, "epoch": 1}}, score=score)
    code, out, _ = run("run")
    assert code == 0
    assert "model.safetensors: " in out
    assert load_file(tmp_path / "model.safetensors")["weight"].unique() == 2
    code, out, _ = run("run", "--best", "-o", "best.safetensors", "--json")
    assert json.loads(out)["checkpoint"] == str(Path("run/step-000000001"))
    assert load_file(tmp_path / "best.safetensors")["weight"].unique() == 1


WRONG = {
    "nothing there": (("none",), "none is not there"),
    "no model in it": (("other",), "is not a checkpoint of a model"),
    "no score in it": (("other", "--best"), "no checkpoint with a score\n  fix: take the latest"),
    "another name": (("other", "-o", "model.pt"), "is not named like one"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_exported_says_why(run: Run, tmp_path: Path, what: str) -> None:
    Store(tmp_path / "other").save(1, {"rows": [1, 2, 3]})
    arguments, words = WRONG[what]
    run(*arguments).assert_told(words)
    assert not list(tmp_path.glob("model*"))
