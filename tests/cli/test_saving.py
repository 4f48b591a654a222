"""What a script saves under `hotloop doctor` and `hotloop profile`: its folder stays as it is, and it finds it all."""

import os
from pathlib import Path

import pytest

from .conftest import Run

SCRIPT = """\
import atexit, logging, os, shutil, sys, tempfile
from pathlib import Path
import numpy as np, torch
from torch import nn
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)
logging.basicConfig(filename="run.log")
atexit.register(lambda: torch.save(1, "best.pt"))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
assert Path("log.txt").read_text() == "a week of training"
shutil.rmtree("checkpoints")
assert not os.path.exists("checkpoints/1.pt")
try:
    open("checkpoints/1.pt", "w")
except FileNotFoundError:
    pass
os.makedirs("checkpoints")
torch.save(2, Path("checkpoints", "2.pt"))
os.remove("old.pt")
assert not Path("old.pt").exists()
os.replace("last.pt", "older.pt")
assert not os.path.exists("last.pt") and Path("older.pt").read_bytes() == b"a week of training"
os.makedirs("runs/new")
torch.save(3, "runs/new/3.pt")
assert torch.load("runs/new/3.pt") == 3
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "x").write_text("x")
assert not os.path.exists(folder)
for number in range(1, 400):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    if number > 3:
        continue
    torch.save(model.state_dict(), "best.pt")
    assert torch.load("best.pt")["weight"].shape == (2, 4)
    with open("opened.pt", "wb") as file:
        torch.save(model.state_dict(), file)
    save_file(model.state_dict(), "best.safetensors")
    assert sorted(load_file("best.safetensors")) == ["bias", "weight"]
    with open("log.txt", "a") as log:
        log.write("step")
    assert Path("log.txt").read_text() == "a week of training" + number * "step"
    np.save("curve.npy", np.ones(number))
    assert np.load("curve.npy").sum() == number
    logging.warning("a line")
    handle, name = tempfile.mkstemp(dir=".")
    with os.fdopen(handle, "wb") as file:
        torch.save(number, file)
    os.replace(name, "whole.pt")
    assert torch.load("whole.pt") == number
"""
PRECIOUS = (
    *("best.pt", "opened.pt", "best.safetensors", "log.txt", "run.log", "curve.npy", "whole.pt", "old.pt", "last.pt"),
    *("older.pt", "checkpoints/1.pt", "checkpoints/2.pt"),
)


@pytest.mark.parametrize("verb", [("profile", "--no-ceilings", "--steps", "5", "--warmup", "2"), ("doctor",)])
def test_files_that_a_script_writes_moves_or_removes_stay_as_they_are(
    verb: tuple[str, ...], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_children: None
) -> None:
    folder = tmp_path / "project"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    for name in PRECIOUS:
        (folder / name).write_bytes(b"a week of training")
        os.utime(folder / name, (1, 1))
    before = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.chdir(folder)
    code, _, err = run(*verb, "--out", "../found", "train.py")
    assert code == 0, err
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    assert found.keys() == before.keys()
    assert not (folder / "runs").exists()
    for path, was in before.items():
        assert path == folder / "train.py" or path.read_bytes() == b"a week of training"
        assert (found[path].st_mtime_ns, found[path].st_mode) == (was.st_mtime_ns, was.st_mode)


@pytest.mark.parametrize("verb", ["profile", "doctor"])
def test_help_says_what_happens_to_what_a_script_writes(verb: str, run: Run) -> None:
    said = " ".join(run(verb, "--help").out.split())
    assert "Files that the script writes, moves or removes stay as they are" in said
