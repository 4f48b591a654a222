"""The cache of plans: whatever lies in it, a run goes on as if it were not there."""

import copy
import itertools
import json
import os
from dataclasses import replace
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
from hotloop.levers import levers_of
from hotloop.plan import Plan, Trial, Tuning
from hotloop.tune.plan_cache import Cache

from ..thorough import some, tries

TUNING = Tuning(
    plan=Plan("cpu", channels_last=True, fused=True),
    trials=(
        Trial("fused", "B", "kept", "it is faster", 1.2, 1.1, 1.3, 0.001, 0.0, 0.0),
        Trial("compile", "B", "kept", "it is faster", 1.5, 1.1, 1.9, 0.001, 20.0, 0.0),
        Trial("graph", "A", "not tried", "it needs a CUDA device"),
    ),
    plain_step=0.002,
    step=0.001,
    steps=1000,
    seconds=1.5,
    device_name="a CPU",
    model="Sequential",
    made="2026-01-01T00:00:00+00:00",
    versions={"torch": "2.13"},
)
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8))
JSON = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something can be changed."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *itertools.chain.from_iterable(places(each, (*path, key)) for key, each in inner)]


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    data = copy.deepcopy(data)
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return data


WRITTEN = json.loads(json.dumps(TUNING.to_json()))


def usable(found: Tuning | None) -> None:
    """None, or something that all the uses of a plan can be made of."""
    if found is None:
        return
    assert found.is_sound()
    levers_of(found.plan)
    assert found.gain is None or f"{found.gain:.3g}"
    assert torch.device(found.plan.device).type == "cpu"
    assert Tuning.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_what_was_put_is_there(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put("a", TUNING)
    assert cache.get("a") == TUNING
    assert cache.get("a", Plan("cpu")) == TUNING
    assert cache.get("a", Plan("cuda")) is None, "the plan of another device"
    assert cache.get("a", Plan("cpu", accumulate=2)) is None


@settings(max_examples=tries(100, 300), deadline=None)
@given(place=st.sampled_from(places(WRITTEN)), value=JSON | st.just(...))
def test_a_file_with_anything_in_any_place(place: tuple[Any, ...], value: Any, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "mutated"
    folder.mkdir(exist_ok=True)
    (folder / "a.json").write_text(json.dumps(None if value is ... and not place else changed(WRITTEN, place, value)))
    usable(Cache(folder).get("a", Plan("cpu")))


@settings(max_examples=tries(70, 200), deadline=None)
@given(content=st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_a_file_with_any_bytes(content: bytes, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "bytes"
    folder.mkdir(exist_ok=True)
    (folder / "a.json").write_bytes(content)
    assert Cache(folder).get("a") is None


NO_PLANS: dict[str, bytes] = {
    "a list": b"[]",
    "a number": b"7",
    "nothing": b"",
    "binary": bytes(range(256)),
    "deep": b"[" * 200_000,
    "deep and whole": b"[" * 5_000 + b"]" * 5_000,
    "steps in words": json.dumps(WRITTEN | {"steps": "x"}).encode(),
    "no steps at all": json.dumps({k: v for k, v in WRITTEN.items() if k != "steps"}).encode(),
    "infinite": json.dumps(WRITTEN | {"step": 1.0}).replace("1.0", "1e999").encode(),
    "nan": json.dumps(WRITTEN | {"step": float("nan")}).encode(),
    "a gain of nothing": json.dumps(changed(WRITTEN, ("trials", 1, "gain"), 0)).encode(),
    "trials of nonsense": json.dumps(WRITTEN | {"trials": ["x", 3, None]}).encode(),
    "trials in words": json.dumps(WRITTEN | {"trials": "kept"}).encode(),
    "a plan of nonsense": json.dumps(WRITTEN | {"plan": {"device": "cpu", "precision": "int3"}}).encode(),
    "no plan": json.dumps(WRITTEN | {"plan": None}).encode(),
    "a device that is none": json.dumps(changed(WRITTEN, ("plan", "device"), "abacus")).encode(),
    "another device": json.dumps(changed(WRITTEN, ("plan", "device"), "cuda")).encode(),
    "a graph on a CPU": json.dumps(changed(WRITTEN, ("plan", "graph"), 4)).encode(),
    "a million workers": json.dumps(changed(WRITTEN, ("plan", "workers"), 10**6)).encode(),
    "true for a number": json.dumps(changed(WRITTEN, ("plan", "accumulate"), True)).encode(),
    "layers that are not there": json.dumps(changed(WRITTEN, ("plan", "recompute"), ["x"])).encode(),
    "large": b" " * (2 << 20) + json.dumps(WRITTEN).encode(),
}


@pytest.mark.parametrize("name", NO_PLANS)
def test_a_file_that_is_no_plan_is_as_if_it_were_not_there(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(NO_PLANS[name])
    assert Cache(tmp_path).get("a", Plan("cpu")) is None


def small_run() -> tuple[Loop, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randn(64, 4)
    loop = Loop(model, torch.optim.SGD(model.parameters(), 0.01), nn.MSELoss(), device="cpu")
    return loop, DataLoader(TensorDataset(x, x[:, :1]), 8)


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
    Cache().put("a", TUNING)
    assert Cache().get("a") is None
    if name in some(PLACES, ["a file"]):  # for a run they are all the same
        loop, loader = small_run()
        assert loop.tune(loader, steps=20, progress=False).plan == loop.plan
        assert loop.fit(loader, progress=False).steps == 8


@pytest.mark.parametrize("place", ["the file", "its folder"])
def test_a_plan_that_somebody_else_could_have_put_there_is_not_used(place: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "plans")
    cache.put("a", TUNING)
    file = tmp_path / "plans" / "a.json"
    assert [oct(path.stat().st_mode & 0o777) for path in (file, file.parent)] == ["0o600", "0o700"]
    touched = file if place == "the file" else file.parent
    touched.chmod(touched.stat().st_mode | 0o020)
    with pytest.warns(PlanWarning, match="other users.*HOTLOOP_CACHE"):
        assert cache.get("a") is None
    with pytest.warns(PlanWarning, match="other users"):
        cache.put("a", replace(TUNING, seconds=3.0))
    touched.chmod(0o700)
    assert cache.get("a") == TUNING


def test_a_pipe_in_place_of_a_plan_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    assert Cache(tmp_path).get("a") is None


def test_no_home_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")  # as `expanduser` does without HOME and an account

    for name in ("HOTLOOP_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    loop, loader = small_run()
    assert loop.tune(loader, steps=20, progress=False) is not None
    assert Cache().get("a") is None


def test_a_plan_that_was_changed_by_hand_to_another_that_is_sound_is_read(tmp_path: Path) -> None:
    Cache(tmp_path).put("a", replace(TUNING, plan=Plan("cpu", fused=True)))
    found = Cache(tmp_path).get("a", Plan("cpu"))
    assert found is not None
    assert found.plan.fused
