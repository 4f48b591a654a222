"""What a simulated script saves: no file of the person's is touched, and the script finds it all the same."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hotloop import simulate

from .test_running import LOOP

PRECIOUS = b"weeks of training"
HELPERS = """
import os, shutil
from pathlib import Path
from safetensors.torch import load_file, save_file, save_model

step()
there = model.state_dict()
here = {name: value.cpu() for name, value in there.items()}
"""


WAYS = [
    ("torch.save(there, 'best.pt')", "torch.load('best.pt')"),
    ("torch.save(here, 'best.pt')", "torch.load('best.pt', weights_only=True, mmap=True)"),
    ("torch.serialization.save(here, 'best.pt')", "torch.serialization.load('best.pt')"),
    ("torch.save(here, Path('best.pt').resolve())", "torch.load('./best.pt')"),
    ("save_file(there, 'best.pt')", "load_file('best.pt')"),
    ("save_file(here, 'best.pt')", "load_file('best.pt')"),
    ("save_model(model, 'best.pt')", "load_file('best.pt')"),
    ("torch.save(here, 'a.pt'); os.replace('a.pt', 'best.pt')", "torch.load('best.pt')"),
    ("torch.save(there, 'a.pt'); os.rename('a.pt', 'best.pt')", "torch.load('best.pt')"),
    ("torch.save(there, 'a.pt'); Path('a.pt').replace('best.pt')", "torch.load('best.pt')"),
    ("torch.save(there, 'a.pt'); shutil.copyfile('a.pt', 'best.pt')", "torch.load('best.pt')"),
    ("torch.save(here, 'a.pt'); shutil.copy2('a.pt', 'best.pt')", "torch.load('best.pt')"),
    ("torch.save(there, 'a.pt'); os.system('cp a.pt best.pt; mv a.pt best.pt')", "torch.load('a.pt')"),
    ("torch.save(there, 'best.pt'); os.replace('best.pt', 'old.pt')", "torch.load('old.pt')"),
    ("torch.save(there, 'best.pt'); os.remove('best.pt')", "there"),
    ("torch.save(here, 'best.pt')", "torch.load('best.pt', map_location='cuda')"),
    ("torch.save(there, 'best.pt')", "torch.load('best.pt', map_location='cpu')"),
]


def test_files_that_were_there_before_stay_as_they_are(run, tmp_path: Path) -> None:
    """Each way in a folder of its own, all in one script."""
    body, before = HELPERS, {}
    for number, (save, load) in enumerate(WAYS):
        path = tmp_path / str(number) / "best.pt"
        path.parent.mkdir()
        path.write_bytes(PRECIOUS)
        path.chmod(0o600)
        before[path] = path.stat()
        body += f"os.chdir({str(path.parent)!r})\n{save}\nfound = {load}\n"
        body += "print(sorted(found), {tensor.device.type for tensor in found.values()})\n"
    ran = run(LOOP + body)
    assert ran.result.error is None
    there = ["='cuda'" in load or ("(there" in save and not re.search("load_file|'cpu'", load)) for save, load in WAYS]
    assert ran.out.splitlines() == [f"['bias', 'weight'] {{'{'cuda' if each else 'cpu'}'}}" for each in there]
    for path, was in before.items():
        now = path.stat()
        assert (path.read_bytes(), now.st_mode, now.st_mtime_ns) == (PRECIOUS, was.st_mode, was.st_mtime_ns)
        assert [each.name for each in path.parent.iterdir()] == ["best.pt"]


def test_also_in_a_block_that_imported_what_saves_before(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOTLOOP_CACHE", str(built.parent.parent))
    path = tmp_path / "best.safetensors"
    path.write_bytes(PRECIOUS)
    with simulate("h200"):
        save_file(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).cuda().state_dict(), path)
        assert sorted(load_file(path)) == ["0.bias", "0.weight", "1.bias", "1.weight"]
        torch.save(torch.ones(3), path)
        assert torch.load(path).tolist() == [1, 1, 1]
    assert path.read_bytes() == PRECIOUS
    save_file({"weight": torch.ones(3)}, path)
    assert load_file(path)["weight"].tolist() == [1, 1, 1]


def test_a_script_finds_what_it_saved_and_nothing_of_it_is_left(run, tmp_path: Path) -> None:
    body = """
for state in (there, here):
    torch.save(state, "last.tmp")
    assert os.path.getsize("last.tmp") >= 40 and Path("last.tmp").is_file()
    os.replace("last.tmp", "last.pt")
    assert not os.path.exists("last.tmp") and os.path.exists("last.pt")
    assert shutil.copy("last.pt", "best.pt") == "best.pt"
    shutil.move("last.pt", "older.pt")
    os.remove("best.pt")
    assert not os.path.exists("best.pt") and not os.path.exists("last.pt")
    os.makedirs("staged")
    torch.save(state, "staged/model.pt")
    os.rename("staged", "final")
    assert sorted(torch.load("final/model.pt")) == sorted(torch.load("older.pt")) == ["bias", "weight"]
    os.rmdir("final")
print("found")
"""
    ran = run(LOOP + f"import os; os.chdir({str(tmp_path)!r})" + HELPERS + body)
    assert (ran.out, ran.result.error) == ("found\n", None)
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


def test_files_that_a_script_moves_or_copies_itself_are_real(run, tmp_path: Path) -> None:
    body = """
torch.save(here, "log.txt")
Path("new.txt").write_text("a log")
os.replace("new.txt", "log.txt")
assert os.path.getsize("log.txt") == 5
shutil.copyfile("log.txt", "copy.txt")
os.remove("log.txt")
"""
    ran = run(LOOP + f"import os; os.chdir({str(tmp_path)!r})" + HELPERS + body)
    assert ran.result.error is None
    assert (tmp_path / "copy.txt").read_text() == "a log"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["copy.txt", "train.py"]


def test_a_file_that_the_script_opened_for_it_is_told_once(run, tmp_path: Path) -> None:
    body = f"""
import io
torch.save(here, io.BytesIO())
for _ in range(2):
    with open({str(tmp_path / "best.pt")!r}, "wb") as file:
        torch.save(here, file)
"""
    ran = run(LOOP + HELPERS + body)
    (told,) = (note for note in ran.result.notes if "torch.save" in note)
    assert "made-up numbers" in told
    assert told.endswith(f"train.py:{ran.line('torch.save(here, file)')}")


def test_whatever_else_reads_what_was_saved_is_told_why_it_cannot(run, tmp_path: Path) -> None:
    ran = run(LOOP + HELPERS + f"path = {str(tmp_path / 'a.pt')!r}\ntorch.save(there, path)\nopen(path, 'rb')\n")
    (found,) = ran.result.findings
    assert "not written to the disk" in found.fix
