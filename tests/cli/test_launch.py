"""`hotloop launch` on this machine: what ranks get, what a person sees when one fails, and mistakes in words."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from ..warm import HOTLOOP, Warm
from .conftest import Run

SCRIPT = """\
import json, os, signal, sys, time
from pathlib import Path

how, rank, life = sys.argv[1], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]


def fail(words, *_):
    raise ValueError(words)


if how == "tell":
    names = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
    told = [[os.environ[name] for name in names], sys.argv, sys.path[0], __file__, __name__, "torch" in sys.modules]
    Path(f"rank-{rank}.json").write_text(json.dumps(told))
if how == "fail":
    Path(f"ready-{rank}").touch()
    while not (Path("ready-0").exists() and Path("ready-1").exists()):
        time.sleep(0.01)
    if rank == "1":
        fail("the cause")
    signal.signal(signal.SIGTERM, lambda *_: fail("the consequence"))
    time.sleep(30)
if how == "twice":
    if rank == "1" and life == "0":
        fail("the first life")
    if rank == "0" and life == "1":
        Path("begun").touch()  # and it has said so
    if rank == "1":
        while not Path("begun").exists():
            time.sleep(0.01)
        Path("begun").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "HOTLOOP_DEBUG")}
    return {**kept, "COLUMNS": "200", **more}


def test_ranks_run_the_script_as_python_runs_it(folder: Path, warm: Warm) -> None:
    command = ("launch", "--processes", "2", "--max-restarts=0", "script.py", "tell", "--gpus", "3")
    done = warm.run(*HOTLOOP, *command, cwd=folder, environment=environment())
    assert done.returncode == 0, done.stderr
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert done.stderr == (
        f"hotloop launch: OMP_NUM_THREADS={threads} torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 "
        "--max-restarts=0 script.py tell --gpus 3\n"
    )
    for rank in "01":
        told = json.loads((folder / f"rank-{rank}.json").read_text())
        assert told == [
            ["2", rank, "127.0.0.1", threads],
            ["script.py", "tell", "--gpus", "3"],
            str(folder),
            str(folder / "script.py"),
            "__main__",
            False,
        ]


def test_the_rank_that_fails_first_is_named_with_its_traceback_once(folder: Path, warm: Warm) -> None:
    done = warm.run(*HOTLOOP, "launch", "--processes", "2", "script.py", "fail", cwd=folder, environment=environment())
    host = socket.gethostname()
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert f"[rank 1 of 2 on {host}] failed:\nTraceback" in done.stderr
    assert f"[rank 0 of 2 on {host}] failed after it: ValueError: the consequence" in done.stderr
    assert done.stderr.endswith(
        f"hotloop: rank 1 on {host} failed first: ValueError: the cause\n"
        "  its traceback is above; the other ranks of this machine were ended\n"
    )
    assert str(folder / "script.py") in done.stderr
    for foreign in ("torch/distributed", "ChildFailedError", "rank_worker.py", "runpy", "scripts.py"):
        assert foreign not in done.stderr


def test_ranks_are_restarted_and_one_that_was_killed_is_named(folder: Path, warm: Warm) -> None:
    command = ("launch", "--processes", "2", "--max-restarts", "1", "script.py", "twice")
    done = warm.run(*HOTLOOP, *command, cwd=folder, environment=environment(TMPDIR=str(folder)))
    host = socket.gethostname()
    assert done.returncode == 128 + signal.SIGKILL
    assert "ValueError: the first life" in done.stderr
    assert f"hotloop launch: restart 1 of 1 on {host}\n" in done.stderr
    assert f"hotloop: rank 1 on {host} was ended by SIGKILL" in done.stderr
    assert "fix: somebody or the kernel killed it" in done.stderr
    assert [file.name for file in folder.iterdir()] == ["script.py"], "no temporary files are left"


def test_a_dry_run_prints_the_line_alone(run: Run, folder: Path) -> None:
    command = ("launch", "--max-restarts", "3", "--processes", "2", "--dry-run", "script.py", "a b")
    code, out, err = run(*command)
    assert (code, err) == (0, "")
    assert out.endswith(
        "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=2 --max-restarts 3 script.py 'a b'\n"
    )
    code, out, err = run("launch", "--json", *command[1:])
    told = json.loads(out)
    assert (told["processes"], told["nodes"]) == (2, "1")
    assert told["command"][-2:] == ["script.py", "a b"]


MISTAKES = {
    "no script": (("missing.py",), 2, "there is no file missing.py"),
    "no process": (("--processes", "0", "script.py"), 2, "--processes 0"),
    "not one GPU": (("--gpus", "0", "script.py"), 2, "--gpus 0"),
    "both": (("--gpus", "1", "--processes", "1", "script.py"), 2, "--gpus and --processes"),
    "nowhere to meet": (("--nodes", "2", "script.py"), 2, "without a place where they meet"),
    "one too many": (
        ("--nodes=2", "--node-rank=2", "--master=node-0:29500", "script.py"),
        2,
        "--node-rank 2 of 2 nodes",
    ),
    "no number of nodes": (("--nodes", "two", "script.py"), 2, "--nodes 'two'"),
    "a range upside down": (("--nodes=4:2", "--master=node-0:29500", "script.py"), 2, "--nodes '4:2'"),
    "no number of restarts": (("--max-restarts", "x", "script.py"), 2, "--max_restarts: invalid int value: 'x'"),
    "no GPU": (("--gpus", "64", "script.py"), 3, "--gpus 64: torch sees "),
    "no number": (("--gpus", "two", "script.py"), 2, "--gpus 'two'"),
    "unknown option": (("--procesess=2", "script.py"), 2, "did you mean '--processes'?"),
    "JSON of a run": (("--json", "script.py"), 2, "--json without --dry-run"),
    "no time": (("--join-timeout", "5", "script.py"), 2, "'5' is not a duration"),
    "nobody at home": (
        ("--nodes=2", "--node-rank=1", "--master=nowhere.invalid:1", "--join-timeout=1s", "--processes=1", "script.py"),
        4,
        "nowhere.invalid:1 did not answer within 1.00 s: ",
    ),
}


@pytest.mark.parametrize(("args", "code", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_ends_in_words(run: Run, folder: Path, args: tuple[str, ...], code: int, says: str) -> None:
    done = run("launch", *args)
    done.assert_told(says, code)
    assert done.out == ""


def test_a_port_that_is_taken_is_told_at_once(run: Run, folder: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        where = f"127.0.0.1:{port}"
        nodes = ("--nodes", "2", "--node-rank", "0", "--master", where)
        code, _, err = run("launch", *nodes, "--processes", "1", "script.py", "tell")
    assert code == 4
    assert f"nodes cannot meet at {where}: port {port} of this host cannot be listened on: address already" in err
    assert f"fix: end what has it, or choose another everywhere: --master 127.0.0.1:{port + 1}" in err
