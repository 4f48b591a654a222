"""safetensors files, written as a stream: tensors come from a device in pieces, without a copy of all of them.

The safetensors package, which reads them, writes only what is whole on the host.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CHUNK = 1 << 20  # bytes that are hashed and written while they are in the processor's cache
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
        self._tensors = in_file_order(tensors)
        self.entries = {name: TensorEntry.of(tensor) for name, tensor in self._tensors.items()}

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
