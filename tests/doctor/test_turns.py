"""Runs of a script in processes of their own."""

import os
import time
from pathlib import Path

import pytest

from hotloop.apps.doctor import turns
from hotloop.apps.doctor.examined_script import ScriptRun
from hotloop.apps.doctor.timing import TURN
from hotloop.apps.doctor.turns import Turns

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


@pytest.mark.parametrize("forks", [True, False])
def test_each_run_has_a_process_that_ends_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_children: None, forks: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(turns, "FORKS", forks)
    (tmp_path / "train.py").write_text(SCRIPT)
    with Turns() as running:
        answers = [running.run(RUN) for _ in range(2)]
    for answer in answers:
        assert len(answer[TURN]["losses"]) == 5
        assert answer[TURN]["losses"][0] == 3
        assert answer["output"] == ["said ['--a', 'b'] True"]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(set(pids)) == 4
    assert gone(pids)
    assert (tmp_path / "cleaned").exists()


def test_forks_that_cannot_use_cuda_give_way_to_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes, in which PyTorch's answer is not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'hotloop.apps.doctor.turns' in sys.orig_argv:\n"
        "    import torch\n"
        "    here = os.getpid()\n"
        "    torch._C._cuda_isInBadFork = lambda: os.getpid() != here\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "train.py").write_text(SCRIPT)
    with Turns() as running:
        assert running.run(RUN)[TURN] is not None
    assert len((tmp_path / "pids").read_text().split()) == 2


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_children) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(300)")
    begun = time.monotonic()
    with Turns() as running:
        answer = running.run(ScriptRun("train.py", (), False, warmup=2, steps=3, limit=2.0))
    assert time.monotonic() - begun < 60
    assert answer["error"] == "its process was killed; it had 2.00 s"
    assert gone([int(answer["output"][0])])


def test_a_script_that_does_not_end_once_it_is_told_to_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_children: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(turns, "FORKS", False)
    monkeypatch.setattr(turns, "GRACE", 0.5)
    (tmp_path / "train.py").write_text(SCRIPT.replace('os.system("touch cleaned")', "__import__('time').sleep(300)"))
    with Turns() as running:
        answer = running.run(RUN)
    assert answer[TURN] is not None
    assert gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])


def test_a_process_that_dies_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_children: None) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os, sys\nprint('last words', flush=True)\nos.abort()")
    with Turns() as running:
        answer = running.run(RUN)
        again = running.run(RUN)  # the process that forks is none the worse for it
    assert answer["error"].startswith("its process was ended by signal 6"), os.name
    assert answer["output"][0] == "last words"
    assert again["error"] == answer["error"]


def test_a_run_has_a_process_of_its_own_where_the_one_that_forks_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_children: None
) -> None:
    """A script may take it along: by the number of its parent."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import os, signal\nif not os.path.exists('done'):\n    os.system('touch done')\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n    os.abort()\n" + SCRIPT
    )
    with Turns() as running:
        answers = [running.run(RUN) for _ in range(2)]
    assert all(answer[TURN] is not None for answer in answers), answers
