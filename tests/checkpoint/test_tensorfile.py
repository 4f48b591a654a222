"""Files of tensors: what others write can be read, what is written others can read, and lies are found out."""

import hashlib
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotloop.checkpoint.folders import Summing
from hotloop.checkpoint.tensorfile import CHUNK, DTYPE_NAMES, HostSource, in_file_order, read_tensors, write_tensors

from ..thorough import tries
from .trees import same


def written(tensors: dict[str, Tensor]) -> bytes:
    file = io.BytesIO()
    write_tensors(file, [HostSource(in_file_order(tensors))])
    return file.getvalue()


def read(content: bytes) -> dict[str, Tensor]:
    return read_tensors(io.BytesIO(content), len(content))


def sample() -> dict[str, Tensor]:
    """Every type, with sizes that would leave the next one at an odd place."""
    made = {str(dtype): torch.arange(3).to(dtype) for dtype in DTYPE_NAMES}
    return {**made, "none": torch.empty(0, 4), "one": torch.tensor(2.5), "é.weight": torch.ones(2, 3).t()}


def test_the_safetensors_package_reads_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(written(sample()))
    assert same(dict(sorted(safetensors.torch.load_file(tmp_path / "t").items())), dict(sorted(sample().items())))


def test_what_the_safetensors_package_writes_is_read() -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in sample().items()}
    content = safetensors.torch.save(contiguous, metadata={"some": "thing"})
    assert same(dict(sorted(read(content).items())), dict(sorted(contiguous.items())))


def test_every_tensor_begins_where_it_can_be_mapped() -> None:
    odd = {"flag": torch.ones(3, dtype=torch.bool), "half": torch.ones(1).half(), "double": torch.ones(1).double()}
    content = written(odd)
    length = int.from_bytes(content[:8], "little")
    starts = {
        name: about["data_offsets"][0] + 8 + length for name, about in json.loads(content[8 : 8 + length]).items()
    }
    assert {name: start % odd[name].element_size() for name, start in starts.items()} == dict.fromkeys(odd, 0)


def test_a_file_without_tensors() -> None:
    assert read(written({})) == {}


def test_bytes_are_summed_on_their_way() -> None:
    large = {"a": torch.arange(CHUNK, dtype=torch.int32), "b": torch.ones(5, dtype=torch.bool)}
    file = io.BytesIO()
    on_the_way = Summing(file)
    write_tensors(on_the_way, [HostSource(in_file_order(large))])
    assert on_the_way.sum.sha256 == hashlib.sha256(file.getvalue()).hexdigest()
    assert on_the_way.sum.size == len(file.getvalue())
    file.seek(0)
    back = Summing(file)
    assert same(read_tensors(back, on_the_way.sum.size), large)
    assert back.sum == on_the_way.sum


def lying(header: Any, data: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def row(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


LIES = {
    "empty": b"",
    "a pickle": b"\x80\x02}q\x00." * 20,
    "a zip": b"PK\x03\x04" + b"\0" * 60,
    "a header longer than the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "the longest header there is": b"\xff" * 8 + b"{}",
    "no JSON": lying(b"{]"),
    "no text": lying(b"\xff\xfe\xfd"),
    "deep JSON": lying(b"[" * 100_000),
    "a large number": lying(b'{"w":' + b"9" * 10_000 + b"}"),
    "a list": lying([1]),
    "no table": lying({"w": 3}),
    "an unknown type": lying(row(dtype="PICKLE")),
    "a type that is a list": lying(row(dtype=["F32"])),
    "a negative shape": lying(row(shape=(-2,))),
    "a shape of booleans": lying(row(shape=(True, 2))),
    "a shape of words": lying(row(shape=("2",))),
    "too many dimensions": lying(row(shape=(1,) * 1000 + (2,))),
    "a shape that is too large": lying(row(shape=(1 << 62,))),
    "an overflowing shape": lying(row(shape=(0, 1 << 70), offsets=(0, 0)), b""),
    "offsets before the file": lying(row(offsets=(-8, 0))),
    "offsets behind the file": lying(row(offsets=(8, 16))),
    "offsets the wrong way": lying(row(offsets=(8, 0))),
    "one offset": lying(row(offsets=(0,))),
    "a hole": lying(row(offsets=(4, 12)), b"\0" * 12),
    "an overlap": lying({**row(), "v": row()["w"]}),
    "more data": lying(row(), b"\0" * 9),
    "less data": lying(row(), b"\0" * 7),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_is_a_value_error(lie: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read(LIES[lie])


@settings(max_examples=tries(100, 300), deadline=None)
@given(st.data())
def test_any_change_is_a_value_error_or_a_file(data: st.DataObject) -> None:
    content = bytearray(written({"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.int8)}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        read(bytes(content[: data.draw(st.integers(0, len(content)))]))
