"""The cache of levers that did not work: whatever lies in it, a run goes on as if it were not there."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotloop import Loop
from hotloop.errors import PlanWarning
from hotloop.tune.tuning_record import DroppedLevers

from ..thorough import tries

DROPPED = {"fused": "with it a step took 1.3 times as long", "bf16": "the gradient turns"}
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
JSON = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def test_what_was_put_is_there(tmp_path: Path) -> None:
    levers = DroppedLevers(tmp_path)
    levers.put("a", DROPPED)
    assert levers.get("a") == DROPPED
    assert levers.get("b") == {}


@settings(max_examples=tries(100, 400), deadline=None)
@given(content=st.binary(max_size=300) | JSON.map(json.dumps).map(str.encode))
def test_a_file_with_anything_in_it(content: bytes, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "anything"
    folder.mkdir(exist_ok=True)
    (folder / "a.json").write_bytes(content)
    found = DroppedLevers(folder).get("a")
    assert all(isinstance(each, str) for pair in found.items() for each in pair)


@pytest.mark.parametrize(
    "content",
    [b"[" * 200_000, b"[" * 5_000 + b"]" * 5_000, b" " * (2 << 20) + json.dumps(DROPPED).encode(), b'{"fused": 1}'],
    ids=["deep", "deep and whole", "large", "a number"],
)
def test_a_file_in_another_form_is_as_if_it_were_not_there(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(content)
    assert DroppedLevers(tmp_path).get("a") == {}


def a_file(path: Path) -> str:
    path.write_text("this is no folder")
    return str(path)


def a_folder_for_each_plan(path: Path) -> str:
    for name in ("plans", "plans/a.json"):
        (path / name).mkdir(parents=True)
    return str(path)


PLACES: dict[str, Any] = {
    "a file": a_file,
    "a folder in place of a plan": a_folder_for_each_plan,
    "the home of nobody": lambda path: "~nobody-of-that-name/cache",
    "a name that is too long": lambda path: f"{path}/{'x' * 5000}",
    "a place that is not to be written": lambda path: "/proc/hotloop",
}


@pytest.mark.parametrize("name", PLACES)
def test_a_cache_that_cannot_be_used_is_as_if_it_were_not_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTLOOP_CACHE", PLACES[name](tmp_path / "cache"))
    DroppedLevers().put("a", DROPPED)
    assert DroppedLevers().get("a") == {}


@pytest.mark.parametrize("place", ["the file", "its folder"])
def test_a_plan_that_somebody_else_could_have_put_there_is_not_used(place: str, tmp_path: Path) -> None:
    cache = DroppedLevers(tmp_path / "plans")
    cache.put("a", DROPPED)
    file = tmp_path / "plans" / "a.json"
    assert [oct(path.stat().st_mode & 0o777) for path in (file, file.parent)] == ["0o600", "0o700"]
    touched = file if place == "the file" else file.parent
    touched.chmod(touched.stat().st_mode | 0o020)
    with pytest.warns(PlanWarning, match="other users.*HOTLOOP_CACHE"):
        assert cache.get("a") == {}
    with pytest.warns(PlanWarning, match="other users"):
        cache.put("a", {})
    touched.chmod(0o700)
    assert cache.get("a") == DROPPED


def test_a_pipe_in_place_of_a_plan_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    assert DroppedLevers(tmp_path).get("a") == {}


def test_no_home_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")  # as `expanduser` does without HOME and an account

    for name in ("HOTLOOP_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(64, 4)
    loop = Loop(model, torch.optim.SGD(model.parameters(), 0.01), nn.MSELoss(), device="cpu")
    assert loop.tune(DataLoader(TensorDataset(x, x[:, :1]), 8), steps=20, progress=False).plan == loop.plan
    assert DroppedLevers().get("a") == {}
