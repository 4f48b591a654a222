"""Files of tensors: what is written, the safetensors package reads."""

import hashlib
import io
import json
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from hotloop.checkpoint.folders import Summing
from hotloop.checkpoint.tensorfile import CHUNK, DTYPE_NAMES, HostSource, write_tensors

from .trees import same


def written(tensors: dict[str, Tensor]) -> bytes:
    file = io.BytesIO()
    write_tensors(file, [HostSource(tensors)])
    return file.getvalue()


def sample() -> dict[str, Tensor]:
    """Every type, with sizes that would leave the next one at an odd place."""
    made = {str(dtype): torch.arange(3).to(dtype) for dtype in DTYPE_NAMES}
    return {**made, "none": torch.empty(0, 4), "one": torch.tensor(2.5), "é.weight": torch.ones(2, 3).t()}


def test_the_safetensors_package_reads_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(written(sample()))
    assert same(dict(sorted(safetensors.torch.load_file(tmp_path / "t").items())), dict(sorted(sample().items())))


def test_every_tensor_begins_where_it_can_be_mapped() -> None:
    odd = {"flag": torch.ones(3, dtype=torch.bool), "half": torch.ones(1).half(), "double": torch.ones(1).double()}
    content = written(odd)
    length = int.from_bytes(content[:8], "little")
    starts = {
        name: about["data_offsets"][0] + 8 + length for name, about in json.loads(content[8 : 8 + length]).items()
    }
    assert {name: start % odd[name].element_size() for name, start in starts.items()} == dict.fromkeys(odd, 0)


def test_a_file_without_tensors() -> None:
    assert safetensors.torch.load(written({})) == {}


def test_bytes_are_summed_on_their_way() -> None:
    large = {"a": torch.arange(CHUNK, dtype=torch.int32), "b": torch.ones(5, dtype=torch.bool)}
    file = io.BytesIO()
    on_the_way = Summing(file)
    write_tensors(on_the_way, [HostSource(large)])
    assert on_the_way.sum.sha256 == hashlib.sha256(file.getvalue()).hexdigest()
    assert on_the_way.sum.size == len(file.getvalue())
