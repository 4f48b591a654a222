"""The first screen of the README runs, and prints what it says."""

import os
import re
from pathlib import Path

from ..warm import Warm

README = Path(__file__).parents[2] / "README.md"


def shape_of(output: str) -> list[str]:
    """Lines without what differs from machine to machine: numbers, units of time, the name of the processor."""
    lines = [re.sub(r"\(.*\): fp32", "(a processor): fp32", line) for line in output.strip().splitlines()]
    return [re.sub(r"[\d.,]+(e-\d+)?( µs| ms| s\b)?", "#", line) for line in lines]


def test_the_first_example_prints_what_is_shown(tmp_path: Path, warm: Warm) -> None:
    text = README.read_text(encoding="utf-8")
    code, shown = re.findall(r"```(?:python|text)\n(.*?)```", text, re.DOTALL)[:2]
    script = tmp_path / "first.py"
    script.write_text(code, encoding="utf-8")
    environment = {**os.environ, "HOTLOOP_DEVICE": "cpu"}
    run = warm.run(script, cwd=tmp_path, environment=environment)
    assert run.returncode == 0, run.stderr
    assert shape_of(run.stderr + run.stdout) == shape_of(shown)
