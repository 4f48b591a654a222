"""Checkpoints of which each rank writes its own rows, and which any number of ranks reads."""

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from hotloop.checkpoint.codec import pack
from hotloop.checkpoint.damage import CheckpointWarning, DamagedCheckpoint
from hotloop.checkpoint.reader import load
from hotloop.checkpoint.shards import ShardEntry, Team, received, starts_of, write_shard
from hotloop.checkpoint.store import Store
from hotloop.checkpoint.sums import Sum, Sums, shard_name
from hotloop.checkpoint.tensorfile import HostSource
from hotloop.checkpoint.weights import export_weights
from hotloop.checkpoint.writer import Writer
from hotloop.errors import OutputError

WHOLE = {
    "a.weight": torch.arange(35.0).view(7, 5),
    "a.bias": torch.arange(7, dtype=torch.bfloat16),
    "few": torch.arange(4.0).view(2, 1, 2),  # fewer rows than four ranks
    "one": torch.arange(3.0).view(1, 3),
}


def team(rank: int, size: int, gather: Callable[[Any], list[Any]] | None = None, patience: float = 60.0) -> Team:
    """A rank whose tensors are its rows alone."""
    return Team(rank, size, gather or (lambda value: [value]), lambda rows, shape: rows, patience)


def rows_of(tensor: Tensor, rank: int, size: int) -> Tensor:
    starts = starts_of(len(tensor), size)
    return tensor[starts[rank] : starts[rank + 1]]


def write(folder: Path, rank: int, size: int, patience: float = 60.0) -> None:
    rows = {name: rows_of(tensor, rank, size) for name, tensor in WHOLE.items()}
    rows = {f"loop.model.{name}": each for name, each in rows.items() if len(each)}
    starts = {f"loop.model.{name}": starts_of(len(tensor), size)[rank] for name, tensor in WHOLE.items()}
    write_shard(folder, team(rank, size, patience=patience), [HostSource(rows)], starts)


def save(store: Store, size: int, step: int = 1) -> Path:
    """A checkpoint of a model over so many ranks, and something that is not sharded."""
    _, state = pack({"loop": {"epoch": 3}})
    state["loop"]["model"] = {
        name: {"$shard": f"loop.model.{name}", **ShardEntry(t.dtype, tuple(t.shape), starts_of(len(t), size)).to_json()}
        for name, t in WHOLE.items()
    }
    with store.begin(step) as making:
        for rank in range(size):
            write(making, rank, size)
        others = partial(received, making, team(0, size), lambda: False)
        return store.finish(making, step, [], state, score=0.5, others=others)


@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_one_process_reads_what_several_ranks_have_written(tmp_path: Path, before: int) -> None:
    path = save(Store(tmp_path), before)
    assert sorted(each.name for each in path.iterdir()) == sorted(
        ["state.json", "sums.json", "tensors.safetensors", *(shard_name(rank, before) for rank in range(before))]
    )
    tree = load(path).tree
    assert tree["loop"]["epoch"] == 3
    assert all(torch.equal(tree["loop"]["model"][name], WHOLE[name]) for name in WHOLE)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 2), (1, 2), (2, 4), (4, 2), (3, 4), (4, 3)])
def test_each_rank_reads_its_own_rows_at_any_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    store = Store(tmp_path)
    save(store, before)
    parts = []
    for rank in range(after):
        found = store.load_latest(team(rank, after))
        parts.append(found.tree["loop"]["model"])
    for name, tensor in WHOLE.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor)


def test_a_rank_reads_no_file_that_has_no_rows_for_it(tmp_path: Path) -> None:
    """Its size is compared, and the rank whose rows are in it says what is wrong with it, to all."""
    store = Store(tmp_path)
    path = save(store, 2)
    flip(path / shard_name(1, 2))
    problems: list[Any] = []

    def gather(value: Any) -> list[Any]:
        problems.append(value)
        return [value, None]

    assert store.load_latest(team(0, 2, gather)) is not None
    assert problems[-1] is None
    others = team(0, 2, lambda value: [value, "rank-1-of-2.safetensors is damaged"])
    with pytest.raises(DamagedCheckpoint, match=r"rank 1: rank-1-of-2\.safetensors is damaged"):
        store.load_latest(
            Team(0, 2, lambda value: [value] if isinstance(value, list) else others.gather(value), others.join)
        )


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "rank-1-of-2.safetensors is missing"),
    "cut short": (cut, "rank-1-of-2.safetensors: it is cut short"),
    "a flipped bit": (flip, "rank-1-of-2.safetensors: its content has changed"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_shard_is_named_and_the_checkpoint_before_is_used(tmp_path: Path, kind: str) -> None:
    store, (damage, words) = Store(tmp_path), DAMAGE[kind]
    save(store, 2, step=1)
    damage(save(store, 2, step=2) / shard_name(1, 2))
    with pytest.warns(CheckpointWarning, match=words):
        found = store.load_latest()
    assert found.step == 1
    with pytest.raises(DamagedCheckpoint, match=words):
        load(tmp_path / "step-000000002")


CLAIMS: dict[str, Callable[[dict[str, Any]], object]] = {
    "more than there is": lambda entry: entry.update(shape=[10**9, 5], starts=[0, 5 * 10**8, 10**9]),
    "rows that go back": lambda entry: entry.update(starts=[0, 9, 7]),
    "rows that are missing": lambda entry: entry.update(starts=[0, 4, 6]),
    "other rows": lambda entry: entry.update(starts=[0, 3, 7]),
    "another number of ranks": lambda entry: entry.update(starts=[0, 7]),
    "another dtype": lambda entry: entry.update(dtype="I32"),
    "no dtype": lambda entry: entry.update(dtype="Q7"),
    "a shape of words": lambda entry: entry.update(shape=["7", 5]),
    "a number of no shape": lambda entry: entry.update(shape=[], starts=[0, 0, 0]),
    "a name that is not there": lambda entry: entry.update({"$shard": "other"}),
    "a name of numbers": lambda entry: entry.update({"$shard": 7}),
}


@pytest.mark.parametrize("kind", CLAIMS)
def test_an_index_that_does_not_fit_the_files_is_refused(tmp_path: Path, kind: str) -> None:
    path = save(Store(tmp_path), 2)
    state = json.loads((path / "state.json").read_text())
    CLAIMS[kind](state["loop"]["model"]["a.weight"])
    content = json.dumps(state).encode()
    (path / "state.json").write_bytes(content)
    sums = Sums.from_bytes((path / "sums.json").read_bytes())
    files = {**sums.files, "state.json": Sum(len(content), hashlib.sha256(content).hexdigest())}
    (path / "sums.json").write_bytes(replace(sums, files=files).to_bytes())
    with pytest.raises(DamagedCheckpoint, match="is damaged"):
        load(path)


def test_what_a_rank_could_not_write_is_told_by_the_first_and_nothing_is_left(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def begin() -> None:
        with store.begin(1) as making:
            (making / shard_name(1, 2)).mkdir()  # where it cannot write a file
            write(making, 0, 2)
            write(making, 1, 2)
            (making / shard_name(1, 2)).rmdir()
            received(making, team(0, 2), lambda: False)

    with pytest.raises(OutputError, match="rank 1 of 2 could not write its shards"):
        begin()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_over", [False, True])
def test_a_rank_that_writes_nothing_is_named(tmp_path: Path, is_over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.checkpoint.shards.SHORT", 0.1)
    write(tmp_path, 0, 3)
    write(tmp_path, 2, 3)
    with pytest.raises(OutputError, match=r"1 rank \(1\) did not write"):
        received(tmp_path, team(0, 3, patience=60.0 if is_over else 0.1), lambda: is_over)


def test_all_ranks_of_a_team_write_or_none(tmp_path: Path) -> None:
    """Two writers in two threads: what rank 0 has begun, all write; a problem of one is that of all."""
    meeting, told = threading.Barrier(2), [None, None]
    folders = [tmp_path, tmp_path]

    def gather(rank: int, value: Any) -> list[Any]:
        meeting.wait(20)
        told[rank] = value
        meeting.wait(20)
        every = list(told)
        meeting.wait(20)
        return every

    def run(rank: int, results: dict[int, Any]) -> None:
        with Writer(Store(folders[rank]), team(rank, 2, partial(gather, rank))) as writer:
            taken = writer.submit(1, {"step": torch.tensor(4)}, wait=True)
            writer.wait()
            results[rank] = (taken, list(writer.problems))

    def both() -> dict[int, Any]:
        results: dict[int, Any] = {}
        threads = [threading.Thread(target=run, args=(rank, results)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results

    assert both() == {0: (True, []), 1: (True, [])}
    assert load(tmp_path / "step-000000001").tree == {"step": torch.tensor(4)}
    folders[1] = tmp_path / "elsewhere"
    with pytest.warns(CheckpointWarning, match="not the folder of rank 0"):
        results = both()
    assert [taken for taken, _ in results.values()] == [False, False]
    assert all("rank 1: " in what for _, (what,) in results.values())
    assert [each.name for each in tmp_path.iterdir()] == ["step-000000001"]


def test_the_model_is_one_file(tmp_path: Path) -> None:
    store = Store(tmp_path / "run")
    save(store, 2, step=1)
    best = save(store, 3, step=2)
    file = tmp_path / "model.safetensors"
    assert export_weights(tmp_path / "run", file) == best
    read = load_file(file)
    assert read.keys() == WHOLE.keys()
    assert all(torch.equal(read[name], WHOLE[name]) for name in WHOLE)
    assert export_weights(tmp_path / "run", file, best=True).name == "step-000000001"
    flip(best / shard_name(2, 3))
    with pytest.raises(DamagedCheckpoint, match="rank-2-of-3"):
        export_weights(best, file)
    assert {each.name for each in tmp_path.iterdir()} == {"model.safetensors", "run"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorch_reads_the_shards_too(tmp_path: Path) -> None:
    path = save(Store(tmp_path), 3)
    state = {f"loop.model.{name}": torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(torch.equal(state[f"loop.model.{name}"], WHOLE[name]) for name in WHOLE)
