"""Weights from elsewhere are read, and nothing that comes with them is run."""

import functools
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from hotloop.checkpoint.store import Store
from hotloop.checkpoint.weights import read_weights
from hotloop.errors import BadArgument

from ..warm import Warm
from .trees import same


def weights() -> dict[str, Tensor]:
    return {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2, dtype=torch.bfloat16)}


SAVERS: dict[str, Any] = {
    "safetensors": save_file,
    "zip": torch.save,
    "legacy": functools.partial(torch.save, _use_new_zipfile_serialization=False),
}


@pytest.mark.parametrize("kind", SAVERS)
def test_weights_are_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pt")
    SAVERS[kind](weights(), path)
    read = read_weights(path)
    assert read.key is None
    assert same(dict(sorted(read.items())), dict(sorted(weights().items())))


WRITE_AGAIN = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from hotloop import read_weights

path = sys.argv[1]
save = save_file if path.endswith(".safetensors") else torch.save
held = {"w": torch.arange(900_000.0), "b": torch.ones(3)}
save(held, path)
read = dict(read_weights(path))
save(read, path)
again = read_weights(path)
Path(path).write_bytes(b"")  # as a download that begins anew
assert all(torch.equal(each[name], held[name]) for each in (read, again) for name in held)
"""


@pytest.mark.parametrize("name", ["e.pt", "e.safetensors"])
def test_weights_that_were_read_can_be_saved_to_the_same_file(tmp_path: Path, name: str, warm: Warm) -> None:
    script = tmp_path / "train.py"
    script.write_text(WRITE_AGAIN)
    done = warm.run(script, tmp_path / name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["zip", "legacy"])
@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_weights_inside_a_checkpoint_are_read(tmp_path: Path, kind: str, key: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    SAVERS[kind]({"epoch": 3, key: model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "w.ckpt")
    read = read_weights(str(tmp_path / "w.ckpt"))
    assert read.key == key
    nn.Linear(3, 2).load_state_dict(read)
    assert same(OrderedDict(read)["weight"], model.weight)


def test_a_tensor_file_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    path = Store(tmp_path).save(1, {"model": weights()})
    assert sorted(read_weights(path / "tensors.safetensors")) == ["model.a.bias", "model.a.weight"]
    with pytest.raises(BadArgument, match="is a checkpoint of hotloop"):
        read_weights(path)


class Bomb:
    """What runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize(("protocol", "named"), [(2, "posix.mkdir"), (4, "torch.load(weights_only=True) refuses it")])
@pytest.mark.parametrize("kind", ["zip", "legacy", "plain"])
def test_a_bomb_does_not_run(tmp_path: Path, kind: str, protocol: int, named: str) -> None:
    path = tmp_path / "w.pt"
    tree = {"w": torch.ones(2), "b": Bomb(tmp_path / "ran")}
    if kind == "plain":
        path.write_bytes(pickle.dumps(Bomb(tmp_path / "ran"), protocol))
    else:
        SAVERS[kind](tree, path, pickle_protocol=protocol)
    with pytest.raises(BadArgument) as caught:
        read_weights(path)
    assert not (tmp_path / "ran").exists()
    assert named in caught.value.what
    assert "would run code from the file" in caught.value.what
    assert "state_dict()" in str(caught.value.fix)
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran")))  # noqa: S301
    assert (tmp_path / "ran").exists(), "a bomb that was not live proves nothing"


@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_a_whole_model_is_refused_by_the_name_of_its_class(tmp_path: Path, kind: str) -> None:
    SAVERS[kind](nn.Linear(2, 2), tmp_path / "w.pt")
    with pytest.raises(BadArgument, match=r"torch\.nn\.modules\.linear\.Linear"):
        read_weights(tmp_path / "w.pt")


def test_a_pickle_under_the_name_of_safetensors_is_refused(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "w.safetensors")
    with pytest.raises(BadArgument, match="is a pickle"):
        read_weights(tmp_path / "w.safetensors")


def picture(path: Path) -> None:
    Image.new("RGB", (4, 4)).save(path, "JPEG")


def archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("notes.txt", "nothing")


def half(path: Path, kind: str = "zip") -> None:
    SAVERS[kind](weights(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scripted(path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 1)), path)


MISTAKES: dict[str, tuple[Any, str]] = {
    "a picture": (picture, "it is cut short, or of another kind"),
    "an empty file": (lambda path: path.write_bytes(b""), "is empty"),
    "one byte": (lambda path: path.write_bytes(b"\x80"), "w.pt"),
    "text": (lambda path: path.write_text("hello"), "cut short, or of another kind"),
    "a web page": (lambda path: path.write_text("<!DOCTYPE html>"), "a web page"),
    "a pointer": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "JSON": (lambda path: path.write_text("{}"), "it is JSON"),
    "another zip": (archive, "cannot be read as weights"),
    "TorchScript": (scripted, "TorchScript"),
    "half a file": (half, "w.pt"),
    "half a legacy file": (lambda path: half(path, "legacy"), "w.pt"),
    "half a safetensors file": (lambda path: half(path, "safetensors"), "w.pt"),
    "a number": (lambda path: torch.save(3, path), "holds an int"),
    "a list": (lambda path: torch.save([torch.ones(1)], path), "holds a list"),
    "no tensors": (lambda path: torch.save({}, path), "holds no tensors at all"),
    "other things": (lambda path: torch.save({"epoch": 1, "w": torch.ones(1)}, path), r"epoch \(int\)"),
    "nothing": (lambda _: None, "is not there"),
    "a pipe": (os.mkfifo, "is not a file"),
    "an empty folder": (Path.mkdir, "a folder without a file of weights"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_no_weights_is_told_with_a_fix(tmp_path: Path, mistake: str) -> None:
    make, words = MISTAKES[mistake]
    make(tmp_path / "w.pt")
    with pytest.raises(BadArgument, match=words) as caught:
        read_weights(tmp_path / "w.pt")
    assert caught.value.fix


def test_a_folder_of_several_asks_for_one(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(BadArgument, match=r"00001-of-00002\.safetensors, model-00002") as caught:
        read_weights(tmp_path)
    assert "name one file" in str(caught.value.fix)
