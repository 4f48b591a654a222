"""The command line as a whole: help that lists the verbs, at once, and messages instead of tracebacks."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import hotloop

from ..warm import HOTLOOP, Warm
from .conftest import Run

HEAVY = ("torch", "matplotlib", "jinja2", "numpy", "torchmetrics", "psutil", "aiohttp")


def test_help_lists_the_verbs_and_the_version_is_that_of_the_package(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    for words in (" device ", " demo ", "HOTLOOP_DEVICE"):
        assert words in done.out
    for flag in ("--help", "-h"):
        assert "hotloop device --require cuda" in run("device", flag).out
    alone = run()
    assert "Usage" in alone.out + alone.err
    assert run("--version").out == f"hotloop {hotloop.__version__}\n"


def test_help_and_what_a_shell_is_told_can_follow_load_nothing_heavy() -> None:
    """One process for all of them: what any of them loads stays loaded."""
    asked = [("--help",), ("demo", "--help"), ("device", "--help"), ("top", "--help"), ("learn",)]
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
    assert all("Usage" in words or "Quiz" in words for words in told[: len(asked)])
    for offered, words in zip(typed.values(), told[len(asked) :], strict=False):
        assert set(offered) <= set(words.split())


@pytest.mark.parametrize("args", [("fly",), ("--fast",), ("demo", "--fast"), ("demo", "extra")])
def test_what_does_not_exist_is_told_without_a_traceback(args: tuple[str, ...], run: Run) -> None:
    done = run(*args)
    assert done.code == 2
    assert args[-1] in done.err
    assert "Traceback" not in done.err


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
    whole = run("tune", "banana").err
    assert max(map(len, whole.splitlines())) > 60
    assert max(map(len, told)) <= 60
    assert " ".join(" ".join(told).split()) == " ".join(whole.split())
    assert all(line.startswith("  ") for line in told[told.index(next(line for line in told if "fix:" in line)) :])


def test_help_in_80_columns_breaks_no_line_early_and_no_example_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.text import Text
    from typer import Context
    from typer.main import get_command
    from typer.testing import CliRunner

    from hotloop.cli import app

    monkeypatch.setenv("COLUMNS", "80")
    every = [((), get_command(app))]
    for verb, command in every:  # with the verbs that are under it
        context = Context(command)
        if hasattr(command, "list_commands"):
            every += [((*verb, name), command.get_command(context, name)) for name in command.list_commands(context)]
        done = CliRunner().invoke(app, [*verb, "--help"])
        assert done.exit_code == 0
        before_the_panels = done.stdout.partition("╭")[0]
        examples = [line for line in Text.from_markup(command.help).plain.splitlines() if line.startswith("  hotloop ")]
        assert all(f" {line.rstrip()}" in before_the_panels for line in examples)

        lines = [line.strip() for line in before_the_panels.splitlines()]
        prose = [(line, after) for line, after in pairwise(lines) if "hotloop " not in line + after]
        early = [line for line, after in prose if line and after and len(f"{line} {after.split()[0]}") <= 78]
        assert not early, verb
        assert "<bool>" not in done.stdout
    assert {("device",), ("sprites", "make"), ("learn", "quiz")} <= {verb for verb, _ in every}
