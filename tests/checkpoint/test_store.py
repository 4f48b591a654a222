"""A store keeps the last checkpoints and the best, replaces without a gap, and clears up after the dead."""

import math
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop.checkpoint import store as store_module
from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.checkpoint.reader import load
from hotloop.checkpoint.store import Store
from hotloop.errors import BadArgument

from .trees import same

FILES = ["state.json", "sums.json", "tensors.safetensors"]


def tree(step: int = 1) -> dict[str, Any]:
    return {"model": {"weight": torch.full((3, 5), float(step))}, "step": step, "betas": (0.9, 0.999)}


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def steps(folder: Path) -> list[int]:
    return [int(name.removeprefix("step-")) for name in names(folder)]


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "run")
    assert store.load_latest() is None
    path = store.save(123, tree(), score=0.5)
    assert path == tmp_path / "deep" / "run" / "step-000000123"
    assert names(path) == FILES
    for loaded in (store.load_latest(), load(str(path))):
        assert (loaded.step, loaded.path, loaded.score) == (123, path, 0.5)
        assert same(loaded.tree, tree())


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for step, score in enumerate([5.0, 1.0, math.nan, 3.0, None, 1.0, -2.0, 2.0]):
        store.save(step, tree(step), score=score)
        best = 0 if step == 0 else 1 if step < 6 else 6
        assert steps(tmp_path) == sorted({best, max(0, step - 1), step})
        assert store.best() == tmp_path / f"step-{best:09d}"
    assert store.load_latest().step == 7


def test_the_newest_is_the_one_that_was_saved_last(tmp_path: Path) -> None:
    """After a run went back to an earlier step, what it saves then is where it stands."""
    store = Store(tmp_path, keep=1)
    for step in (100, 200, 150):
        store.save(step, tree(step))
    assert store.load_latest().step == 150
    assert steps(tmp_path) == [150]


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(5, tree(1))
    store.save(5, tree(2))
    assert names(tmp_path) == ["step-000000005"]
    assert same(store.load_latest().tree, tree(2))


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_replacement_that_is_cut_anywhere_leaves_one_of_the_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    store = Store(tmp_path)
    store.save(5, tree(1))
    renames = []

    class Killed(BaseException):
        pass

    def rename(self: Path, target: Path) -> Path:
        if len(renames) == cut:
            raise Killed
        renames.append(target)
        os.rename(self, target)  # noqa: PTH104  # what is replaced here
        return target

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        patched.setattr(store_module.folders, "remove", lambda _: None)  # the dead do not clear up
        with pytest.raises(Killed):
            store.save(5, tree(2))
    assert same(store.load_latest().tree, tree(2 if cut == 2 else 1))
    store.save(6, tree(3))
    assert names(tmp_path) == ["step-000000005", "step-000000006"]


def test_what_dead_saves_left_is_cleared(tmp_path: Path) -> None:
    dead, removed = tmp_path / ".saving-dead", tmp_path / ".removing-step-000000001-a"
    for folder in (dead, removed):
        folder.mkdir()
        (folder / "tensors.safetensors").write_bytes(b"half")
    foreign = tmp_path / ".saving-notes"
    foreign.mkdir()
    (foreign / "mine.txt").write_text("keep")
    Store(tmp_path).save(1, tree())
    assert names(tmp_path) == [".saving-notes", "step-000000001"]
    assert names(foreign) == ["mine.txt"]


def test_links_in_the_folder_are_never_followed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "run"
    Store(outside).save(9, tree(9))
    Store(folder, keep=1).save(1, tree())
    for name in (".saving-x", ".removing-x", "step-000000009"):
        (folder / name).symlink_to(outside / "step-000000009")
    Store(folder, keep=1).save(2, tree(2))
    assert names(outside / "step-000000009") == FILES
    with pytest.warns(CheckpointWarning, match="step-000000009 is a link"):
        latest = Store(folder).load_latest()
    assert latest.step == 2
    Store(folder).save(9, tree(3))
    assert names(outside / "step-000000009") == FILES
    assert same(load(outside / "step-000000009").tree, tree(9))


def test_damaged_and_foreign_folders_are_not_removed_and_do_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    (store.save(1, tree()) / "sums.json").write_text("{}")
    (tmp_path / "step-notes").mkdir()
    for step in range(2, 6):
        store.save(step, tree(step))
    assert names(tmp_path) == ["step-000000001", "step-000000004", "step-000000005", "step-notes"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an old one that is damaged is nobody's concern
        assert store.load_latest() is not None


@pytest.mark.parametrize("number", [-1, 0, 1.5, True, None, "3"])
def test_keep_must_be_a_count(tmp_path: Path, number: Any) -> None:
    with pytest.raises(BadArgument, match="keep is"):
        Store(tmp_path, number)
    assert names(tmp_path) == []


def test_more_data_than_can_be_read_back_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LARGEST_STATE", 1000)
    with pytest.raises(BadArgument, match="besides tensors"):
        Store(tmp_path).save(1, {"long": list(range(1000))})


def test_the_best_is_of_the_goal_of_the_newest_score(tmp_path: Path) -> None:
    Store(tmp_path, keep=1, goal="max accuracy").save(1, tree(), score=-0.9)
    assert Store(tmp_path).best() == tmp_path / "step-000000001"
    store = Store(tmp_path, keep=1, goal="min loss")
    store.save(2, tree())
    assert steps(tmp_path) == [1, 2], "the best of before stays until there is another"
    store.save(3, tree(), score=0.5)
    store.save(4, tree(), score=0.7)
    assert Store(tmp_path).best() == tmp_path / "step-000000003"
    assert steps(tmp_path) == [3, 4]
