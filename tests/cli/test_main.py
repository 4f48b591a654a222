"""The command line as a whole: help that lists the verbs, at once, and messages instead of tracebacks."""

import os
import subprocess
import sys

import pytest

import hotloop

HEAVY = ("torch", "matplotlib", "jinja2", "numpy", "torchmetrics", "psutil")


def run(*args: str, python: tuple[str, ...] = ("-m", "hotloop")) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TERM": "dumb", "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *python, *args], capture_output=True, text=True, timeout=60, check=False, env=env
    )


def test_help_lists_the_verbs() -> None:
    done = run("--help")
    assert done.returncode == 0
    for verb in ("device", "demo"):
        assert f" {verb} " in done.stdout
    assert "HOTLOOP_DEVICE" in done.stdout


def test_without_arguments_it_shows_the_help() -> None:
    assert "Usage" in run().stdout + run().stderr


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").stdout == f"hotloop {hotloop.__version__}\n"


@pytest.mark.parametrize("verb", ["device", "demo"])
def test_the_help_of_a_verb_teaches_by_examples(verb: str) -> None:
    for flag in ("--help", "-h"):
        done = run(verb, flag)
        assert done.returncode == 0
        assert "Examples" in done.stdout
        assert f"hotloop {verb}" in done.stdout


@pytest.mark.parametrize("args", [("--help",), ("demo", "--help"), ("device", "--help")])
def test_help_loads_nothing_heavy(args: tuple[str, ...]) -> None:
    script = (
        "import sys\n"
        f"sys.argv = ['hotloop', *{args!r}]\n"
        "from hotloop.cli import main\n"
        "try: main()\n"
        f"finally: print('loaded:', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    assert "loaded: []" in run(python=("-c", script)).stdout


@pytest.mark.parametrize("args", [("fly",), ("--fast",), ("demo", "--fast"), ("demo", "extra")])
def test_what_does_not_exist_is_told_without_a_traceback(args: tuple[str, ...]) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert args[-1] in done.stderr
    assert "Traceback" not in done.stderr
