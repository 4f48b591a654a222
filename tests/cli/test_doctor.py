"""`hotloop doctor` as a program: what it prints and leaves, what `--apply` writes, JSON, errors, endings."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hotloop.apps.doctor.diagnosis import Diagnosis
from hotloop.cli import main

from ..processes import gone
from ..warm import HOTLOOP, Warm

SCRIPT = """\
import argparse, gc
import torch
from torch import nn

torch.set_num_threads(1)
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4)
width = parser.parse_args().width
kept = [[] for _ in range(300_000)]
model = nn.Linear(width, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
while True:
    loss = model(torch.ones(3, width)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    gc.collect()  # a fault
"""
OPTIONS = ("--steps", "10", "--turns", "3")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], forked_children: None
) -> Run:
    """The command line in this process, which has torch already; the script has its own even so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("hotloop.apps.doctor.examination.SECONDS", 0.2)
    (tmp_path / "train.py").write_text(SCRIPT)

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["hotloop", "doctor", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(args, ended.value.code or 0, *capfd.readouterr())

    return call


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
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["findings"]
    assert (found["code"], found["verdict"]) == ("gc.collect()  # a fault", "confirmed")
    assert found["losses"] == "all 8 losses are equal to the bit"


def test_findings_are_shown_and_a_patch_is_left_that_applies(run: Run, tmp_path: Path) -> None:
    done = run(*OPTIONS, "--out", "found", "train.py", "--width", "8")
    assert done.returncode == 0, done.stderr
    assert re.search(r"1  train.py:17  \d+\.\d\d× as fast \(\d+\.\d\d to \d+\.\d\d\)", done.stdout)
    assert "-    gc.collect()  # a fault" in done.stdout
    assert "losses are equal to the bit" in done.stdout
    assert "1 fix helps" in done.stdout
    assert "hotloop: looking at its steps" in done.stderr
    assert sorted(file.name for file in (tmp_path / "found").iterdir()) == [
        "fixes.patch",
        "report.html",
        "report.json",
    ]
    page = (tmp_path / "found/report.html").read_text()
    assert "What slows train.py down" in page
    assert '<span class="removed">-    gc.collect()  # a fault</span>' in page
    assert (tmp_path / "train.py").read_text() == SCRIPT
    command = re.search(r"`(patch .*)`", done.stdout)
    assert command is not None
    assert command[1] == "patch -p1 < found/fixes.patch"
    git = shutil.which("git")
    assert git is not None
    subprocess.run([git, "apply", "found/fixes.patch"], cwd=tmp_path, check=True)
    assert (tmp_path / "train.py").read_text() == SCRIPT.replace("    gc.collect()  # a fault\n", "")
    data = json.loads((tmp_path / "found/report.json").read_text())
    assert data["kind"] == "doctor"
    assert Diagnosis.from_json(data["diagnosis"]).confirmed


def test_apply_writes_the_fixes_and_json_tells_of_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").chmod(0o750)
    done = run(*OPTIONS, "--apply", "--json", "train.py")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["changed"] == [str(tmp_path / "train.py")]
    assert data["findings"][0]["verdict"] == "confirmed"
    assert "gc.collect()" not in (tmp_path / "train.py").read_text()
    assert (tmp_path / "train.py").stat().st_mode & 0o777 == 0o750
    assert Path(data["folder"], "report.html").exists()


def test_a_file_that_was_changed_meanwhile_stays_as_it_is(run: Run, tmp_path: Path, monkeypatch) -> None:
    from hotloop.apps.doctor.examination import Examination

    examine = Examination.run

    def and_edit(examination: Examination) -> Diagnosis:
        found = examine(examination)
        (tmp_path / "train.py").write_text("mine = 1\n")
        return found

    monkeypatch.setattr(Examination, "run", and_edit)
    done = run(*OPTIONS, "--apply", "train.py")
    assert done.returncode == 2
    assert "train.py was changed while it was examined, so nothing was written" in done.stderr
    assert (tmp_path / "train.py").read_text() == "mine = 1\n"
    assert not (tmp_path / "runs").exists()


def test_a_script_without_faults_is_told_so(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("    gc.collect()  # a fault\n", ""))
    done = run(*OPTIONS, "--out", "found", "train.py")
    assert done.returncode == 0, done.stderr
    assert "19 rules found nothing to repair." in " ".join(done.stdout.split())
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
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr
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
