"""safetensors files, written from a stream of bytes and read into place, so that each byte is summed on its way.

The safetensors package writes and reads whole files at once. Here the bytes come from a device in pieces, or are hashed
while they arrive, which takes no second copy and no second reading; any reader of safetensors can read the result.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CHUNK = 1 << 20  # bytes that are hashed and written while they are in the processor's cache
LONGEST_HEADER = 100_000_000  # what every reader accepts
MOST_DIMENSIONS = 64  # what PyTorch computes with
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class Sink(Protocol):
    def write(self, data: memoryview | bytes, /) -> object: ...


class ReadableFile(Protocol):
    def readinto(self, buffer: memoryview, /) -> int: ...


@dataclass(frozen=True)
class TensorEntry:
    """What the header of the file says of a tensor, besides its name and place."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorEntry":
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Source(Protocol):
    """Tensors that are on their way into a file."""

    @property
    def entries(self) -> Mapping[str, TensorEntry]: ...

    def chunks(self) -> Iterator[memoryview]:
        """The bytes of all of them, one tensor after another; a chunk is valid until the next is asked for."""
        ...


class HostSource:
    """Tensors in the memory of the host; others are copied there one at a time."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.entries = {name: TensorEntry.of(tensor) for name, tensor in tensors.items()}

    def chunks(self) -> Iterator[memoryview]:
        for tensor in self._tensors.values():
            yield from bytes_of(tensor.detach().to("cpu"))


def bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The memory of a tensor of the host in the order of its elements, in chunks."""
    if tensor.numel():
        whole = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield from (whole[start : start + CHUNK] for start in range(0, len(whole), CHUNK))


def in_file_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The largest elements first, so that each tensor begins at a multiple of its own element's size."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, str(item[1].device))))


def write_tensors(file: Sink, sources: Sequence[Source], about: Mapping[str, str] | None = None) -> None:
    """Write the tensors of all sources, which must come in file order; `about` goes into the header."""
    file.write(_header({name: entry for source in sources for name, entry in source.entries.items()}, about))
    for source in sources:
        for chunk in source.chunks():
            file.write(chunk)


def _header(entries: Mapping[str, TensorEntry], about: Mapping[str, str] | None) -> bytes:
    table: dict[str, object] = {} if about is None else {"__metadata__": about}
    position = 0
    for name, entry in entries.items():
        end = position + entry.nbytes
        table[name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": (position, end)}
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_tensors(file: ReadableFile, size: int) -> dict[str, Tensor]:
    """Read a file of `size` bytes, each byte once and into its place; whatever does not fit is a ValueError."""
    tensors: dict[str, Tensor] = {}
    for name, entry in read_header(file, size):
        try:
            tensors[name] = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        except (RuntimeError, TypeError, OverflowError) as error:
            raise ValueError(f"no memory for a tensor of shape {entry.shape}") from error
        fill(file, tensors[name])
    return tensors


def fill(file: ReadableFile, tensor: Tensor) -> None:
    """Read the bytes of a tensor of the host, which is contiguous, into its memory."""
    for chunk in bytes_of(tensor):
        _fill(file, chunk)


def skip(file: ReadableFile, count: int) -> None:
    """Read so many bytes and drop them; they are summed."""
    scratch = memoryview(bytearray(min(count, CHUNK)))
    while count:
        _fill(file, scratch[: min(count, CHUNK)])
        count -= min(count, CHUNK)


def read_header(file: ReadableFile, size: int) -> list[tuple[str, TensorEntry]]:
    """The tensors in the order of their bytes, after it was seen that these fill the file exactly."""
    length = int.from_bytes(_take(file, 8, size), "little")
    if length > min(size - 8, LONGEST_HEADER):
        raise ValueError("it does not begin like a safetensors file")
    try:
        table = json.loads(_take(file, length, size))
    except (ValueError, RecursionError) as error:
        raise ValueError("its header is not JSON") from error
    if not isinstance(table, dict):
        raise ValueError("its header is not a table")
    table.pop("__metadata__", None)
    rows = sorted((_row(name, about) for name, about in table.items()), key=lambda row: row[:2])
    position = 0
    for start, end, name, entry in rows:
        if start != position or end - start != entry.nbytes:
            raise ValueError(f"its header gives {name[:80]!r} an impossible offset")
        position = end
    if position != size - 8 - length:
        raise ValueError("its header and its size differ")
    return [(name, entry) for _, _, name, entry in rows]


def _row(name: str, about: object) -> tuple[int, int, str, TensorEntry]:
    match about:
        case {"dtype": str(kind), "shape": [*shape], "data_offsets": [int(start), int(end)]} if (
            kind in DTYPES and len(shape) <= MOST_DIMENSIONS and all(type(n) is int and n >= 0 for n in shape)
        ):
            return start, end, name, TensorEntry(DTYPES[kind], tuple(shape))
    raise ValueError(f"its header describes {name[:80]!r} in a way that cannot be read")


def _take(file: ReadableFile, count: int, size: int) -> bytes:
    if count > size:
        raise ValueError("it is cut short")
    held = bytearray(count)
    _fill(file, memoryview(held))
    return bytes(held)


def _fill(file: ReadableFile, room: memoryview) -> None:
    while room:
        count = file.readinto(room)
        if not count:
            raise ValueError("it is cut short")
        room = room[count:]
