"""A checkpoint that is not exactly what was saved is found out, named, and the last sound one is used."""

import hashlib
import json
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotloop.checkpoint.damage import CheckpointWarning, DamagedCheckpoint
from hotloop.checkpoint.reader import load, read_sums
from hotloop.checkpoint.store import Store
from hotloop.checkpoint.sums import Sum, Sums
from hotloop.errors import BadArgument

from ..thorough import tries
from .trees import same

TREE = {"model": {"weight": torch.arange(15.0)}, "words": ["a", "b"], "step": 7}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "run")
    made.save(6, TREE)
    made.save(7, TREE)
    return made


def newest(store: Store) -> Path:
    return store.folder / "step-000000007"


def vouch(path: Path, **changes: Any) -> None:
    """Sums that fit the files, as one who wants to deceive would write them."""
    files = {}
    for name in ("tensors.safetensors", "state.json"):
        content = (path / name).read_bytes()
        files[name] = Sum(len(content), hashlib.sha256(content).hexdigest())
    (path / "sums.json").write_bytes(
        Sums(**{"step": 7, "number": 9, "score": None, "files": files, **changes}).to_bytes()
    )


def cut(path: Path, name: str = "tensors.safetensors") -> None:
    (path / name).write_bytes((path / name).read_bytes()[:-9])


def grow(path: Path) -> None:
    (path / "state.json").write_bytes((path / "state.json").read_bytes() + b" ")


def other_version(path: Path) -> None:
    about = json.loads((path / "sums.json").read_text())
    (path / "sums.json").write_text(json.dumps({**about, "version": 99, "hotloop": "9.9\x1b[2J"}))


def other_step(path: Path) -> None:
    about = json.loads((path / "sums.json").read_text())
    (path / "sums.json").write_text(json.dumps({**about, "step": 70}))


def other_content(path: Path) -> None:
    content = bytearray((path / "tensors.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "tensors.safetensors").write_bytes(content)


def other_header(path: Path) -> None:
    content = bytearray((path / "tensors.safetensors").read_bytes())
    content[9] ^= 255
    (path / "tensors.safetensors").write_bytes(content)


def swap(path: Path) -> None:
    other = path.with_name("step-000000006")
    shutil.rmtree(path)
    shutil.copytree(other, path)


def be_a_pipe(path: Path) -> None:
    (path / "state.json").unlink()
    os.mkfifo(path / "state.json")


def be_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tensors cut short": (cut, r"tensors\.safetensors: it is cut short: \d+ of \d+ bytes"),
    "tensors emptied": (lambda path: (path / "tensors.safetensors").write_bytes(b""), "cut short: 0 of"),
    "a longer file": (grow, "not the file that was written"),
    "a bit flipped": (other_content, "has changed since it was written"),
    "a bit of the header flipped": (other_header, "has changed since it was written"),
    "a step flipped": (other_step, r"sums\.json does not hold what was written"),
    "another checkpoint of the same size": (swap, "not what its name says"),
    "no tensors": (lambda path: (path / "tensors.safetensors").unlink(), r"tensors\.safetensors is missing"),
    "no state": (lambda path: (path / "state.json").unlink(), r"state\.json is missing"),
    "no sums": (lambda path: (path / "sums.json").unlink(), r"sums\.json is missing"),
    "a file of somebody else": (lambda path: (path / "sums.json").write_text('{"a": 1}'), "not written by hotloop"),
    "sums that are a list": (lambda path: (path / "sums.json").write_text("[]"), "not written by hotloop"),
    "sums that are long": (lambda path: (path / "sums.json").write_bytes(b" " * 10**7), "far too long"),
    "sums that are deep": (lambda path: (path / "sums.json").write_bytes(b"[" * 60_000), "not JSON"),
    "another version": (other_version, r"version 99, written by hotloop 9\.9\\x1b"),
    "a pipe": (be_a_pipe, r"state\.json is not a file"),
    "a file in place of the folder": (be_a_file, r"step-000000007: sums\.json cannot be read: Not a directory"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_one_before_is_used(store: Store, kind: str) -> None:
    damage, words = DAMAGE[kind]
    damage(newest(store))
    with pytest.warns(CheckpointWarning, match=words) as caught:
        loaded = store.load_latest()
    assert len(caught) == 1
    assert "step-000000007" in str(caught[0].message)
    assert "step-000000006 is used instead" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert loaded.step == 6
    assert same(loaded.tree, TREE)


def test_one_that_is_named_is_not_replaced_by_another(store: Store) -> None:
    cut(newest(store))
    with pytest.raises(DamagedCheckpoint, match="cut short"):
        load(newest(store))
    with pytest.raises(BadArgument, match="no checkpoint folder"):
        load(store.folder / "nowhere")


def test_a_link_that_the_person_names_is_followed(store: Store, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(newest(store))
    assert load(tmp_path / "latest").step == 7


def test_what_else_lies_in_the_folder_is_not_looked_at(store: Store) -> None:
    (newest(store) / ".DS_Store").write_bytes(b"\0")
    assert store.load_latest().step == 7


class Bomb:
    """What runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json"])
@pytest.mark.parametrize("kind", ["plain", "zip", "legacy"])
def test_a_pickle_in_place_of_a_file_is_not_run(store: Store, tmp_path: Path, name: str, kind: str) -> None:
    bomb = Bomb(tmp_path / "ran")
    target = newest(store) / name
    if kind == "plain":
        target.write_bytes(pickle.dumps(bomb))
    else:
        torch.save({"w": bomb}, target, _use_new_zipfile_serialization=kind == "zip")
    vouch(newest(store))
    with pytest.raises(DamagedCheckpoint, match=name):
        load(newest(store))
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(bomb))  # noqa: S301
    assert (tmp_path / "ran").exists(), "a bomb that was not live proves nothing"


@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "sums.json"])
def test_a_link_in_place_of_a_file_is_not_followed(store: Store, tmp_path: Path, name: str) -> None:
    (newest(store) / name).rename(tmp_path / name)
    (newest(store) / name).symlink_to(tmp_path / name)
    with pytest.raises(DamagedCheckpoint, match=f"{name} is a link"):
        load(newest(store))


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "tensors.safetensors/../../x"])
def test_names_that_lead_out_of_the_folder_are_refused(store: Store, name: str) -> None:
    about = Sum(1, "0" * 64)
    vouch(newest(store), files={"tensors.safetensors": about, "state.json": about, name: about})
    with pytest.raises(DamagedCheckpoint, match="lacks what it should hold"):
        load(newest(store))
    vouch(newest(store), files={name: about, "state.json": about})
    with pytest.raises(DamagedCheckpoint, match="lacks what it should hold"):
        load(newest(store))


STATES = {
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "not JSON": b"\x80\x04",
    "not a number": b'{"a": NaN}',
    "a tag that is not known": b'{"$call": ["os.system", "true"]}',
}


@pytest.mark.parametrize("kind", STATES)
def test_state_that_nobody_saved_is_refused(store: Store, kind: str) -> None:
    (newest(store) / "state.json").write_bytes(STATES[kind])
    vouch(newest(store))
    with pytest.raises(DamagedCheckpoint, match=r"state\.json"):
        load(newest(store))


def test_a_file_that_may_not_be_read(store: Store, as_nobody: None) -> None:
    with pytest.raises(BadArgument, match=r"cannot look for checkpoints in .*: Permission denied"):
        store.load_latest()
    with pytest.raises(DamagedCheckpoint, match=r"sums\.json cannot be read: Permission denied"):
        read_sums(newest(store))


def test_a_size_that_lies_reserves_nothing(store: Store) -> None:
    files = {"tensors.safetensors": Sum(1 << 50, "0" * 64), "state.json": Sum(1 << 50, "0" * 64)}
    vouch(newest(store), files=files)
    tracemalloc.start()
    with pytest.raises(DamagedCheckpoint, match="cut short"):
        load(newest(store))
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


@settings(max_examples=tries(25, 60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_shows(store: Store, data: st.DataObject) -> None:
    path = newest(store) / data.draw(st.sampled_from(["tensors.safetensors", "state.json", "sums.json"]))
    before = path.read_bytes()
    content = bytearray(before)
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        loaded = load(newest(store))
    except DamagedCheckpoint:
        pass
    else:  # such as the case of a letter in the version of hotloop, where it is not summed
        assert same(loaded.tree, TREE)
        assert json.loads(content) == json.loads(before)
    finally:
        path.write_bytes(before)
