"""`hotloop doctor` as a program: what it prints and leaves, what `--apply` writes, JSON, errors, endings."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from hotloop.apps.doctor.diagnosis import Diagnosis
from hotloop.apps.doctor.examination import Examination
from hotloop.records import files

from ..processes import gone
from ..warm import HOTLOOP, Warm
from .conftest import Run

SCRIPT = """\
import argparse, gc
import torch
from torch import nn

torch.set_num_threads(1)
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4)
width = parser.parse_args().width
kept = [[] for _ in range(50_000)]
model = nn.Linear(width, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
while True:
    loss = model(torch.ones(3, width)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    gc.collect()  # a fault
"""
OPTIONS = ("--steps", "6", "--turns", "3")
VERB = ("doctor",)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_children: None) -> None:
    monkeypatch.setattr("hotloop.apps.doctor.examination.SECONDS", 0.1)
    (tmp_path / "train.py").write_text(SCRIPT)


def test_a_script_without_an_optimizer_is_examined(run: Run, tmp_path: Path) -> None:
    body = (
        SCRIPT.partition("optimizer = ")[0]
        + """
import time
begun = time.monotonic()
while time.monotonic() < begun + 60:
    loss = model(torch.ones(3, width)).square().sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter -= 0.01 * gradient
    gc.collect()  # a fault
"""
    )
    (tmp_path / "by_hand.py").write_text(body)
    done = run("--steps", "4", "--turns", "3", "--json", "by_hand.py")
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)["findings"]
    assert (found["code"], found["verdict"]) == ("gc.collect()  # a fault", "confirmed")
    assert found["losses"] == "all 8 losses are equal to the bit"


def test_findings_are_shown_and_written_where_they_are_asked_for(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a patch, by `--apply` and, if the file was changed meanwhile, not at all."""
    script, repaired = tmp_path / "train.py", SCRIPT.replace("    gc.collect()  # a fault\n", "")
    found: list[tuple[Diagnosis, dict[Path, tuple[str, str]]]] = []
    examine = Examination.run

    def kept(examination: Examination) -> Diagnosis:
        found.append((examine(examination), examination.changed))
        return found[0][0]

    monkeypatch.setattr(Examination, "run", kept)
    done = run(*OPTIONS, "--out", "found", "train.py", "--width", "8")
    assert done.code == 0, done.err
    assert re.search(r"1  train.py:17  \d+\.\d\d× as fast \(\d+\.\d\d to \d+\.\d\d\)", done.out)
    for words in ("-    gc.collect()  # a fault", "losses are equal to the bit", "1 fix helps"):
        assert words in done.out
    assert "hotloop: looking at its steps" in done.err
    assert {file.name for file in (tmp_path / "found").iterdir()} == {"fixes.patch", "report.html", "report.json"}
    page = (tmp_path / "found/report.html").read_text()
    assert "What slows train.py down" in page
    assert '<span class="removed">-    gc.collect()  # a fault</span>' in page
    data = json.loads((tmp_path / "found/report.json").read_text())
    assert data["kind"] == "doctor"
    assert Diagnosis.from_json(data["diagnosis"]) == found[0][0]
    assert found[0][0].is_sound()
    assert script.read_text() == SCRIPT
    assert "`patch -p1 < found/fixes.patch`" in done.out
    subprocess.run([str(shutil.which("git")), "apply", "found/fixes.patch"], cwd=tmp_path, check=True)
    assert script.read_text() == repaired
    script.write_text(SCRIPT)
    script.chmod(0o750)

    def as_before(examination: Examination) -> Diagnosis:
        diagnosis, examination.changed = found[0]
        return diagnosis

    monkeypatch.setattr(Examination, "run", as_before)
    done = run("--apply", "--json", "train.py")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["changed"] == [str(script)]
    assert data["findings"][0]["verdict"] == "confirmed"
    assert script.read_text() == repaired
    assert script.stat().st_mode & 0o777 == 0o750
    assert Path(data["folder"], "report.html").exists()
    shutil.rmtree(tmp_path / "runs")
    script.write_text("mine = 1\n")
    done = run("--apply", "train.py")
    assert done.code == 2
    assert "train.py was changed while it was examined, so nothing was written" in done.err
    assert script.read_text() == "mine = 1\n"
    assert not (tmp_path / "runs").exists()


def test_a_script_without_faults_is_told_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("    gc.collect()  # a fault\n", ""))
    done = run(*OPTIONS, "--out", "found", "train.py")
    assert done.code == 0, done.err
    assert "19 rules found nothing to repair." in " ".join(done.out.split())
    assert not (tmp_path / "found/fixes.patch").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.py"], 2, "there is no file missing.py"),
        (["train.py", "--wide", "3"], 1, "unrecognized arguments: --wide 3"),
        (["--turns", "1", "train.py"], 2, "--turns"),
    ],
)
def test_what_cannot_be_done_is_explained_and_nothing_is_left(
    run: Run, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    done = run(*arguments)
    assert done.code == code
    assert message in done.err
    assert "Traceback" not in done.err
    assert [file.name for file in tmp_path.iterdir()] == ["train.py"]


def test_ctrl_c_ends_the_script_and_leaves_nothing(tmp_path: Path, warm: Warm) -> None:
    (tmp_path / "train.py").write_text("import os\nos.system(f'echo {os.getpid()} >> pids')\n" + SCRIPT)
    (tmp_path / "temporary").mkdir()
    process = warm.start(
        *HOTLOOP,
        "doctor",
        "--apply",
        "train.py",
        cwd=tmp_path,
        environment={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
        err=tmp_path / "err",
        own_session=True,
        forks=True,
    )
    while len(lines := (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []) < 2:
        assert psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE, (tmp_path / "err").read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 130
    assert "stopped; your files are unchanged" in (tmp_path / "err").read_text()
    assert gone([int(line) for line in lines])
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not (tmp_path / "runs").exists()
    assert "gc.collect()" in (tmp_path / "train.py").read_text()


def test_fixes_of_several_files_are_written_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotloop.apps.doctor.doctor_verb import _write

    first, second = tmp_path / "train.py", tmp_path / "data.py"
    write = files.write_whole

    def full(file: Path, content: bytes) -> None:
        if file == second:
            raise OSError("no space left")
        write(file, content)

    monkeypatch.setattr(files, "write_whole", full)
    for file in (first, second):
        file.write_text("slow\n")
    with pytest.raises(OSError, match="no space"):
        _write({first: ("slow\n", "fast\n"), second: ("slow\n", "fast\n")})
    assert [file.read_text() for file in (first, second)] == ["slow\n", "slow\n"]
