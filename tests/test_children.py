"""A program and all it started end as one, however the one that waits for it is ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hotloop.scripts.children import Child

from .processes import gone

FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN) if "stubborn" in sys.argv else None
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1] + "~", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + "~", sys.argv[1])
time.sleep(600 if "leave" not in sys.argv else 0)
"""
WAITING = """
import sys, tempfile
from hotloop.scripts.children import Child
with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
    with Child([sys.executable, *sys.argv[2:]], grace=0.5) as child:
        child.wait()
"""


def numbers(file: Path) -> list[int]:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(word) for word in file.read_text().split()]


@pytest.mark.parametrize(
    ("how", "manner"),
    [(signal.SIGTERM, "polite"), (signal.SIGHUP, "polite"), (signal.SIGINT, "polite"), (signal.SIGTERM, "stubborn")],
)
def test_signals_end_the_whole_family_and_the_blocks_around_it(
    how: signal.Signals, manner: str, tmp_path: Path
) -> None:
    family, waiting, kept = tmp_path / "family.py", tmp_path / "waiting.py", tmp_path / "kept"
    family.write_text(FAMILY)
    waiting.write_text(WAITING)
    kept.mkdir()
    command = [sys.executable, str(waiting), str(kept), str(family), str(tmp_path / "pids"), manner]
    parent = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    family_pids = numbers(tmp_path / "pids")
    parent.send_signal(how)
    code = parent.wait(60)
    assert code in (128 + how, -how)
    assert gone(family_pids)
    assert list(kept.iterdir()) == []


def test_what_a_program_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    with Child([sys.executable, str(tmp_path / "family.py"), str(tmp_path / "pids"), "leave"]) as child:
        assert child.wait() == 0
    assert gone(numbers(tmp_path / "pids"))


def test_a_program_is_waited_for_as_long_as_asked_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Child([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        assert child.wait(0.05) is None
        assert os.getpgid(child.pid) == child.pid
    assert child.wait() == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_is_handed_on_where_the_program_ends_by_itself() -> None:
    program = "import time\ntry:\n    print(flush=True)\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    exit(7)"
    started, theirs = os.pipe()
    with os.fdopen(started, "rb") as output, Child([sys.executable, "-c", program], stdout=theirs) as child:
        os.close(theirs)
        output.read(1)
        child.interrupt()
        assert child.wait() == 7
