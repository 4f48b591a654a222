"""The command line as a whole: help that lists the verbs, at once, and messages instead of tracebacks."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

import hotloop
from hotloop.cli import main

from ..warm import HOTLOOP, Warm

HEAVY = ("torch", "matplotlib", "jinja2", "numpy", "torchmetrics", "psutil", "aiohttp")


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process, which has imported what prints already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "100")

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["hotloop", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(args, ended.value.code or 0, *capsys.readouterr())

    return call


def test_help_lists_the_verbs(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    for verb in ("device", "demo"):
        assert f" {verb} " in done.stdout
    assert "HOTLOOP_DEVICE" in done.stdout


def test_without_arguments_it_shows_the_help(run: Run) -> None:
    done = run()
    assert "Usage" in done.stdout + done.stderr


def test_the_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version").stdout == f"hotloop {hotloop.__version__}\n"


@pytest.mark.parametrize("verb", ["device", "demo"])
def test_the_help_of_a_verb_teaches_by_examples(verb: str, run: Run) -> None:
    for flag in ("--help", "-h"):
        done = run(verb, flag)
        assert done.returncode == 0
        assert "Examples" in done.stdout
        assert f"hotloop {verb}" in done.stdout


def test_help_and_what_a_shell_is_told_can_follow_load_nothing_heavy() -> None:
    """One process for all of them: what any of them loads stays loaded."""
    asked = [("--help",), ("demo", "--help"), ("device", "--help"), ("top", "--help")]
    typed = {"hotloop t": ["train", "tune", "top"], "hotloop top --de": ["--demo"], "hotloop learn ": ["check"]}
    script = f"""
import os, sys
from hotloop.cli import main

def run(*args):
    sys.argv = ["hotloop", *args]
    try: main()
    except SystemExit: print("loaded:", [name for name in {HEAVY} if name in sys.modules])

for args in {asked}: run(*args)
os.environ["_HOTLOOP_COMPLETE"] = "complete_bash"
for typed in {list(typed)}:
    os.environ |= {{"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}}
    run()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    told = done.stdout.split("loaded: []\n")
    assert len(told) == len(asked) + len(typed) + 1, done.stdout + done.stderr
    assert all("Usage" in words for words in told[: len(asked)])
    for offered, words in zip(typed.values(), told[len(asked) :], strict=False):
        assert set(offered) <= set(words.split())


@pytest.mark.parametrize("args", [("fly",), ("--fast",), ("demo", "--fast"), ("demo", "extra")])
def test_what_does_not_exist_is_told_without_a_traceback(args: tuple[str, ...], run: Run) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert args[-1] in done.stderr
    assert "Traceback" not in done.stderr


MOVED = {
    ("train", "classify", "my art.safetensors", "--epochs", "3"): "sprites train 'my art.safetensors' --epochs 3",
    ("train", "draw"): "sprites draw",
    ("generate", "-c", "sword"): "sprites generate -c sword",
    ("evaluate", "drawer.safetensors", "--judge", "x.safetensors"): (
        "sprites evaluate drawer.safetensors --judge x.safetensors"
    ),
}


@pytest.mark.parametrize(("old", "new"), MOVED.items(), ids=lambda each: each[0] if isinstance(each, tuple) else None)
def test_a_spelling_of_the_last_version_is_told_with_the_new_one(old: tuple[str, ...], new: str, run: Run) -> None:
    done = run(*old)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"has moved, to the verbs of sprites\n  fix: hotloop {new}\n")


@pytest.mark.skipif(os.name == "nt", reason="no pseudo-terminals here")
def test_a_terminal_gets_an_error_in_lines_of_its_width_and_a_pipe_gets_it_whole(
    run: Run, warm: Warm, tmp_path: Path
) -> None:
    ours, theirs = os.openpty()
    try:
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "60"}
        where = os.ttyname(theirs)
        assert warm.start(*HOTLOOP, "tune", "banana", cwd=tmp_path, environment=env, terminal=where).wait() == 2
        told = os.read(ours, 10_000).decode().splitlines()
    finally:
        os.close(ours)
        os.close(theirs)
    whole = run("tune", "banana").stderr
    assert max(map(len, whole.splitlines())) > 60
    assert max(map(len, told)) <= 60
    assert " ".join(" ".join(told).split()) == " ".join(whole.split())
    assert all(line.startswith("  ") for line in told[told.index(next(line for line in told if "fix:" in line)) :])


VERBS = [
    [],
    *(
        verb.split()
        for verb in (
            "demo",
            "device",
            "train",
            "evaluate",
            "bench",
            "sprites",
            "sprites make",
            "sprites preview",
            "sprites import",
            "sprites info",
            "sprites train",
            "sprites draw",
            "sprites evaluate",
            "sprites generate",
            "export",
            "tune",
            "profile",
            "simulate",
            "launch",
            "learn",
            "learn check",
            "learn quiz",
            "report",
            "top",
        )
    ),
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_help_in_80_columns_breaks_no_line_early_and_no_example_at_all(
    verb: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.text import Text
    from typer import Context
    from typer.main import get_command
    from typer.testing import CliRunner

    from hotloop.cli import app

    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, [*verb, "--help"])
    assert done.exit_code == 0
    before_the_panels = done.stdout.partition("╭")[0]

    command, context = get_command(app), Context(get_command(app))
    for name in verb:
        command = command.get_command(context, name)  # type: ignore[attr-defined]
    examples = [line for line in Text.from_markup(command.help).plain.splitlines() if line.startswith("  hotloop ")]
    assert all(f" {line.rstrip()}" in before_the_panels for line in examples)

    lines = [line.strip() for line in before_the_panels.splitlines()]
    prose = [(line, after) for line, after in pairwise(lines) if "hotloop " not in line + after]
    early = [line for line, after in prose if line and after and len(f"{line} {after.split()[0]}") <= 78]
    assert not early
    assert "<bool>" not in done.stdout
