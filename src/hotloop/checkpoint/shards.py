"""Tensors whose rows lie over several ranks: each rank writes its own rows, and any number of ranks can read them.

A rank's file is a safetensors file whose header says where its rows begin, in the words of PyTorch's
`torch.distributed.checkpoint`: its `HuggingFaceStorageReader` reads these files too.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hotloop.checkpoint import folders
from hotloop.checkpoint.sums import Sum, shard_name
from hotloop.checkpoint.tensorfile import DTYPE_NAMES, DTYPES, Source, TensorEntry, write_tensors
from hotloop.errors import OutputError
from hotloop.printing.text import plural, printable
from hotloop.values.tree import leaves

POLL = 0.02  # seconds between two looks for the files of other ranks
SHARD_PATIENCE = 600.0  # seconds in which the file of another rank must grow
SHORT = 5.0  # the same once the run has failed: another rank may be no more


@dataclass(frozen=True)
class ShardEntry(TensorEntry):
    """A tensor whose rows, along its first dimension, lie over several ranks."""

    starts: tuple[int, ...]  # where the rows of each rank begin, and at last their number

    @classmethod
    def of_sharded(cls, tensor: Any) -> "ShardEntry | None":
        """The entry of a `DTensor` as FSDP2 makes them; None for one that is sharded in another way."""
        mesh, placements = tensor.device_mesh, tensor.placements
        if mesh.ndim != 1 or len(placements) != 1 or not placements[0].is_shard(0) or tensor.dtype not in DTYPE_NAMES:
            return None
        entry = cls(tensor.dtype, tuple(tensor.shape), starts_of(tensor.shape[0], mesh.size()))
        start, stop = entry.rows(mesh.get_local_rank())
        return entry if len(tensor.to_local()) == stop - start else None

    def rows(self, rank: int) -> tuple[int, int]:
        """The rows that a rank has written."""
        return self.starts[rank], self.starts[rank + 1]

    def to_json(self) -> dict[str, Any]:
        return {"dtype": DTYPE_NAMES[self.dtype], "shape": list(self.shape), "starts": list(self.starts)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ShardEntry":
        """An entry from a file; whatever cannot be one is a ValueError."""
        match data:
            case {"dtype": str(kind), "shape": [*shape], "starts": [0, *rest]} if (
                kind in DTYPES and shape and all(type(n) is int and n >= 0 for n in (*shape, *rest))
            ):
                starts = (0, *rest)
                if rest and starts == tuple(sorted(starts)) and starts[-1] == shape[0]:
                    return cls(DTYPES[kind], tuple(shape), starts)
        raise ValueError("it describes a shard in a way that cannot be read")


def starts_of(rows: int, size: int) -> tuple[int, ...]:
    """Where the rows of each of `size` ranks begin, as `torch.chunk` and FSDP2 deal them out.

    >>> starts_of(5, 2), starts_of(2, 4)
    ((0, 3, 5), (0, 1, 2, 2, 2))
    """
    each = -(-rows // size)
    return tuple(min(rank * each, rows) for rank in range(size + 1))


@dataclass(frozen=True)
class Team:
    """The ranks that write and read a checkpoint together, each its own rows."""

    rank: int
    size: int
    gather: Callable[[Any], list[Any]]  # plain data of all ranks, by rank; all of them call it
    join: Callable[[Tensor, tuple[int, ...]], Tensor]  # this rank's rows → the tensor of that shape, over all ranks
    patience: float = SHARD_PATIENCE

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def first_problem(self, problem: str | None) -> str | None:
        """That of any rank which has one, with its name."""
        told = self.gather(problem)
        return next((f"rank {rank}: {each}" for rank, each in enumerate(told) if each is not None), None)


# Writing


def write_shard(folder: Path, team: Team, sources: Sequence[Source], starts: Mapping[str, int]) -> None:
    """Write the rows of this rank into a folder, and beside them a receipt: what they are, or why there are none."""
    name = shard_name(team.rank, team.size)
    try:
        with folders.written(folder / name) as file:
            write_tensors(file, sources, _dcp_header(sources, starts))
        told: dict[str, Any] = {"size": file.sum.size, "sha256": file.sum.sha256}
    except Exception as error:  # noqa: BLE001  # the first rank tells of it
        words = error.strerror if isinstance(error, OSError) else None
        told = {"error": str(words or f"{type(error).__name__}: {error}")[:300]}
    making = folder / f"{name}.making"
    with suppress(OSError):  # then the first rank sees no receipt
        making.write_text(json.dumps(told), encoding="utf-8")
        making.rename(folder / f"{name}.json")


def received(folder: Path, team: Team, is_over: Callable[[], bool]) -> dict[str, Sum]:
    """What all ranks have written, once they have; `is_over` says that the run has failed, and others with it."""
    sums: dict[str, Sum] = {}
    names = [shard_name(rank, team.size) for rank in range(team.size)]
    grown, since = -1, time.monotonic()
    while len(sums) < len(names):
        for rank, name in enumerate(names):
            receipt = folder / f"{name}.json"
            if name in sums or not receipt.exists():
                continue
            told = json.loads(receipt.read_text(encoding="utf-8"))
            if "error" in told:
                raise OutputError(
                    f"rank {rank} of {team.size} could not write its shards: {printable(told['error'])}",
                    fix="free space there; the folder must be one that all ranks can write to",
                )
            sums[name] = Sum(told["size"], told["sha256"])
            receipt.unlink()
        now = sum(_length(folder / name) for name in names) + len(sums)
        if now != grown:
            grown, since = now, time.monotonic()
        if time.monotonic() - since > (min(SHORT, team.patience) if is_over() else team.patience):
            missing = [str(rank) for rank, name in enumerate(names) if name not in sums]
            raise OutputError(
                f"{plural(len(missing), 'rank')} ({', '.join(missing[:8])}) did not write their shards",
                fix="check that they still run; the folder must be one that all ranks can write to",
            )
        if len(sums) < len(names):
            time.sleep(POLL)
    return sums


def _length(path: Path) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116  # asked again and again
    except OSError:
        return 0


def _dcp_header(sources: Sequence[Source], starts: Mapping[str, int]) -> dict[str, str]:
    """What PyTorch's own reader of sharded safetensors files looks for."""
    shapes = {name: entry.shape for source in sources for name, entry in source.entries.items()}
    offsets = {name: {"saved_offsets": [starts[name], *(0 for _ in shape[1:])]} for name, shape in shapes.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets, separators=(",", ":"))}


# Reading


class Assembly:
    """Tensors that are put together from the rows in ranks' files: all rows, or those of one rank of a team."""

    def __init__(self, entries: Mapping[str, ShardEntry], size: int, held: int, team: Team | None = None) -> None:
        """`size` ranks have written `held` bytes in all: no more memory is taken for what a file claims."""
        if any(len(entry.starts) != size + 1 for entry in entries.values()):
            raise ValueError(f"it describes shards of another number of ranks than {size}")
        if sum(entry.nbytes for entry in entries.values()) > held:
            raise ValueError("it describes more than its files hold")
        self._entries, self._team = entries, team
        self._rows = {name: self._mine(entry) for name, entry in entries.items()}
        self._memory = {
            name: torch.empty((stop - start, *entries[name].shape[1:]), dtype=entries[name].dtype, device="cpu")
            for name, (start, stop) in self._rows.items()
        }

    def _mine(self, entry: ShardEntry) -> tuple[int, int]:
        if self._team is None:
            return 0, entry.shape[0]
        starts = starts_of(entry.shape[0], self._team.size)
        return starts[self._team.rank], starts[self._team.rank + 1]

    def needs(self, rank: int) -> bool:
        """Whether the file of a rank that has written has rows for this one."""
        return any(_common(self._rows[name], entry.rows(rank)) for name, entry in self._entries.items())

    def read(self, rank: int, path: Path) -> None:
        """Take the rows of a rank's file; one that does not hold what it should is a ValueError."""
        expected = {name: entry.rows(rank) for name, entry in self._entries.items() if _common(entry.rows(rank))}
        with safe_open(path, "pt") as file:
            if set(file.keys()) != expected.keys():
                raise ValueError("it holds other tensors than it should")
            for name, (start, stop) in expected.items():
                entry, rows = self._entries[name], file.get_slice(name)
                if (rows.get_dtype(), rows.get_shape()) != (DTYPE_NAMES[entry.dtype], [stop - start, *entry.shape[1:]]):
                    raise ValueError(f"its header describes {name[:80]!r} in another way than it should")
                if (common := _common(self._rows[name], (start, stop))) is not None:
                    first, last, mine = *common, self._rows[name][0]
                    self._memory[name][first - mine : last - mine] = rows[first - start : last - start]

    def tensors(self) -> dict[str, Tensor]:
        """What was put together: whole tensors, or those of the team."""
        if self._team is None:
            return self._memory
        return {name: self._team.join(rows, self._entries[name].shape) for name, rows in self._memory.items()}


def _common(*ranges: tuple[int, int]) -> tuple[int, int] | None:
    """The rows that are in all ranges; None where there are none."""
    start, stop = max(start for start, _ in ranges), min(stop for _, stop in ranges)
    return (start, stop) if start < stop else None


def shards_in(data: Any) -> dict[str, ShardEntry]:
    """The shards that the JSON of a checkpoint describes, by name."""
    found = [each for each in leaves(data, _is_shard) if _is_shard(each)]
    if not all(isinstance(each["$shard"], str) for each in found):
        raise ValueError("the name of a shard is a string")
    return {each["$shard"]: ShardEntry.from_json(each) for each in found}


def _is_shard(data: Any) -> bool:
    return type(data) is dict and next(iter(data), "") == "$shard"
