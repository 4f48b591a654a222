"""Runs of a script in processes of their own."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hotloop.apps.doctor import turns
from hotloop.apps.doctor.examined_script import ScriptRun
from hotloop.apps.doctor.timing import TURN
from hotloop.apps.doctor.turns import Turns
from hotloop.scripts.forks import Forks

from ..processes import gone

SCRIPT = """
import os, subprocess, sys
import torch

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])  # left behind
os.system(f"echo {os.getpid()} {child.pid} >> pids")
print("said", sys.argv[1:], sys.stdin.read() == "")
weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
try:
    while True:
        weight.square().sum().backward()
        optimizer.step()
finally:
    os.system("touch cleaned")
"""
RUN = ScriptRun("train.py", ("--a", "b"), False, warmup=2, steps=3)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_children: None) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)


def pids() -> list[int]:
    return [int(pid) for pid in Path("pids").read_text().split()]


@pytest.mark.parametrize("forks", [True, False])
def test_each_run_has_a_process_that_ends_with_all_it_started(monkeypatch: pytest.MonkeyPatch, forks: bool) -> None:
    monkeypatch.setattr(turns, "FORKS", forks)
    with Turns() as running:
        answers = [running.run(RUN) for _ in range(2)]
    for answer in answers:
        assert len(answer[TURN]["losses"]) == 5
        assert answer[TURN]["losses"][0] == 3
        assert answer["output"] == ["said ['--a', 'b'] True"]
    assert len(set(pids())) == 4
    assert gone(pids())
    assert Path("cleaned").exists()


def test_forks_that_cannot_use_cuda_give_way_to_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("without_cuda.py").write_text(
        "import os, runpy, torch\nhere = os.getpid()\n"
        "torch._C._cuda_isInBadFork = lambda: os.getpid() != here and not os.system('touch asked')\n"
        "runpy.run_module('hotloop.apps.doctor.turns', run_name='__main__')\n"
    )
    monkeypatch.setattr(turns, "Forks", lambda module, **options: Forks("without_cuda", **options))
    with Turns() as running:
        assert running.run(RUN)[TURN] is not None
    assert Path("asked").exists()
    assert len(pids()) == 2


def test_a_run_that_takes_too_long_is_ended() -> None:
    Path("train.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(300)")
    begun = time.monotonic()
    with Turns() as running:
        answer = running.run(replace(RUN, limit=2.0))
    assert time.monotonic() - begun < 60
    assert answer["error"] == "its process was killed; it had 2.00 s"
    assert gone([int(answer["output"][0])])


def test_a_script_that_does_not_end_once_it_is_told_to_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "FORKS", False)
    monkeypatch.setattr(turns, "GRACE", 0.5)
    Path("train.py").write_text(SCRIPT.replace('os.system("touch cleaned")', "__import__('time').sleep(300)"))
    with Turns() as running:
        assert running.run(RUN)[TURN] is not None
    assert gone(pids())


def test_a_process_that_dies_says_how() -> None:
    Path("train.py").write_text("import os, sys\nprint('last words', flush=True)\nos.abort()")
    with Turns() as running:
        answer = running.run(RUN)
        again = running.run(RUN)  # the process that forks is none the worse for it
    assert answer["error"].startswith("its process was ended by signal 6"), os.name
    assert answer["output"][0] == "last words"
    assert again["error"] == answer["error"]


def test_a_run_has_a_process_of_its_own_where_the_one_that_forks_is_gone() -> None:
    """A script may take it along: by the number of its parent."""
    Path("train.py").write_text(
        "import os, signal\nif not os.path.exists('done'):\n    os.system('touch done')\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n    os.abort()\n" + SCRIPT
    )
    with Turns() as running:
        answers = [running.run(RUN) for _ in range(2)]
    assert all(answer[TURN] is not None for answer in answers), answers
