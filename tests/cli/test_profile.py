"""`hotloop profile` as a program: the script in its own process, the folder that is left, JSON, errors."""

import gzip
import json
import os
import pty
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hotloop.profiling.profile_record import Profile

from ..processes import gone
from ..thorough import THOROUGH
from ..warm import HOTLOOP, Warm
from .conftest import Run

SCRIPT = """
import argparse, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)

class Slow(Dataset):
    def __len__(self):
        return 2000

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.randn(8), index % 2

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
given = parser.parse_args()
net = nn.Linear(8, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
try:
    for inputs, targets in DataLoader(Slow(), batch_size=4):
        loss = nn.functional.cross_entropy(net(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = loss.item()
finally:
    print("clean", given.steps)
"""


VERB = ("profile",)
pytestmark = pytest.mark.usefixtures("forked_children")


def test_a_script_is_profiled_and_a_page_is_left(tmp_path: Path, warm: Warm) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {**os.environ, "TERM": "dumb", "COLUMNS": "120"}
    options = ("--steps", "4", "--warmup", "6", "--no-ceilings", "--out", "out")
    command = (*HOTLOOP, "profile", *options, "train.py", "--steps", "77")
    done = warm.run(*command, cwd=tmp_path, environment=env, forks=True)
    assert done.returncode == 0, done.stderr
    assert "clean 77" in done.stdout  # what stands after the script is the script's own
    assert "waiting for data" in done.stdout
    assert "train.py:" in done.stdout
    assert "out/report.html" in done.stdout
    assert "hotloop: profiling 4 steps" in done.stderr
    assert "USDT" not in done.stderr
    data = json.loads((tmp_path / "out/report.json").read_text())
    profile = Profile.from_json(data["profile"])
    assert (data["kind"], profile.steps, profile.name) == ("profile", 4, "train.py")
    assert profile.parts.data > 4 * 0.008
    assert "last = loss.item()" in (tmp_path / "out/report.html").read_text()
    trace = json.loads(gzip.decompress((tmp_path / "out/trace.json.gz").read_bytes()))
    assert trace["traceEvents"]


def test_json_is_one_object_and_the_scripts_words_go_past_it(tmp_path: Path, run: Run) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run("--steps", "2", "--warmup", "1", "--json", "train.py")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert "clean 5" in done.err
    assert Path(tmp_path, data["folder"], "report.html").exists()
    assert data["ceilings"]["fp32"] > 0
    assert data["steps"] == 2


def test_a_script_without_an_optimizer_is_profiled(tmp_path: Path, run: Run) -> None:
    (tmp_path / "train.py").write_text(
        "import time, torch\nweight = torch.ones(3, requires_grad=True)\nbegun = time.monotonic()\n"
        "while time.monotonic() < begun + 60:\n    weight.square().sum().backward()\n"
        "    weight.data.add_(weight.grad, alpha=-0.1)\n    weight.grad = None\n"
    )
    done = run("--steps", "3", "--warmup", "1", "--no-ceilings", "--json", "train.py")
    assert done.code == 0, done.err
    profile = json.loads(done.out)
    assert (profile["steps"], profile["skipped"]) == (3, 2)
    assert any(each["line"] and "weight.square()" in each["line"]["code"] for each in profile["operations"])


def test_an_error_of_the_script_ends_it_and_leaves_nothing(tmp_path: Path, run: Run) -> None:
    (tmp_path / "broken.py").write_text("def deep():\n    raise KeyError('gone')\n\ndeep()\n")
    done = run("broken.py")
    assert done.code == 1
    assert done.err.splitlines()[-1] == "KeyError: 'gone'"
    assert "hotloop/" not in done.err
    assert not (tmp_path / "runs").exists()


CRASHES = {
    "os._exit(1)": "broken.py ended with code 1",
    "os.kill(os.getpid(), signal.SIGSEGV)": "broken.py was ended by signal 11",
}


@pytest.mark.parametrize(("crash", "says"), CRASHES.items(), ids=["exit", "signal"])
def test_a_crash_of_the_whole_process_is_told_and_leaves_nothing(
    tmp_path: Path, run: Run, crash: str, says: str
) -> None:
    (tmp_path / "broken.py").write_text(f"import os, signal\n{crash}\n")
    done = run("broken.py")
    assert done.code == 1
    assert f"{says} before its steps were profiled" in done.err
    assert not (tmp_path / "runs").exists()


MISTAKES = {("absent.py",): "there is no file absent.py", ("--steps", "0", "train.py"): "--steps", (): "SCRIPT"}


@pytest.mark.parametrize(("args", "says"), MISTAKES.items(), ids=["no file", "no steps", "nothing"])
def test_mistakes_are_told_before_anything_runs(tmp_path: Path, run: Run, args: tuple[str, ...], says: str) -> None:
    (tmp_path / "train.py").write_text("print('ran')\n")
    done = run(*args)
    assert done.code == 2
    assert says in done.out + done.err
    assert "ran" not in done.out
    assert "Traceback" not in done.err


FAMILY = """
import subprocess, time
subprocess.Popen(["sh", "-c", "echo $PPID $$ > pids~; mv pids~ pids; exec sleep 600"])
time.sleep(600)
"""


def test_ended_from_outside_it_ends_the_script_and_leaves_nothing(tmp_path: Path, warm: Warm) -> None:
    ours, theirs = pty.openpty()
    endings: dict[str, Callable[[int], None]] = {
        **({"SIGTERM": lambda pid: os.kill(pid, signal.SIGTERM)} if THOROUGH else {}),  # ends it as SIGHUP does
        "SIGINT": lambda pid: os.kill(pid, signal.SIGINT),
        "a closed terminal": lambda pid: os.close(ours),
    }
    processes = {}
    for name in endings:
        folder = tmp_path / name
        (folder / "temporary").mkdir(parents=True)
        (folder / "train.py").write_text(FAMILY)
        processes[name] = warm.start(
            *HOTLOOP,
            "profile",
            "train.py",
            cwd=folder,
            environment={**os.environ, "TMPDIR": str(folder / "temporary")},
            terminal=os.ttyname(theirs) if name == "a closed terminal" else None,
            forks=not THOROUGH,
        )
    os.close(theirs)
    for name, end in endings.items():
        while not (tmp_path / name / "pids").exists():
            assert psutil.Process(processes[name].pid).status() != psutil.STATUS_ZOMBIE
            time.sleep(0.05)
        assert list((tmp_path / name / "temporary").iterdir())
        end(processes[name].pid)
    for name, process in processes.items():
        assert process.wait() in {128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGHUP}
        assert gone(map(int, (tmp_path / name / "pids").read_text().split()))
        assert not list((tmp_path / name / "temporary").iterdir())
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["pids", "temporary", "train.py"]
