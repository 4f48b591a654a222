"""Run every example and write what they print into one Markdown file.

python examples/record.py --out examples.md
python examples/record.py --only 13
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch

import hotloop

EXAMPLES = Path(__file__).resolve().parent
ROOT = EXAMPLES.parent
TIMEOUT = 300  # seconds for one example; each needs about ten


class Failed(Exception):
    """An example did not run to its end."""


def find(only: str) -> list[Path]:
    """The examples in order, those whose name contains `only`."""
    files = sorted(EXAMPLES.glob("[0-9][0-9]_*.py"))
    return [file for file in files if only in file.name]


def output_of(example: Path) -> str:
    """What one example prints."""
    command = [sys.executable, str(example)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    try:
        done = subprocess.run(  # noqa: S603  # our own files
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{example.name} took more than {TIMEOUT} s") from error
    if done.returncode:
        raise Failed(f"{example.name} ended with status {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout.strip()


def without_private_paths(text: str) -> str:
    """Paths in the checkout become relative to it, and a home directory becomes `~`."""
    for path, instead in ((f"{ROOT}{os.sep}", ""), (str(ROOT), "."), (str(Path.home()), "~")):
        if path not in ("/", ""):
            text = text.replace(path, instead)
    return text


def heading() -> str:
    """Where and when the record was made."""
    choice = hotloop.pick()
    hardware = f"{choice.name or 'unknown'} ({choice.device}), {os.cpu_count()} CPU cores"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"# The examples on {hardware}\n\n{versions}, {datetime.now(UTC):%Y-%m-%d}. Timings vary from run to run.\n"


def record(examples: list[Path]) -> str:
    parts = [heading()]
    for example in examples:
        print(f"running {example.name}", file=sys.stderr)
        parts.append(f"## {example.name}\n\n```text\n{output_of(example)}\n```\n")
    return without_private_paths("\n".join(parts))


def write(text: str, out: Path | None) -> None:
    """To the file, all or nothing; to the screen without one."""
    if out is None:
        sys.stdout.write(text)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=out.parent, encoding="utf-8", delete=False) as unfinished:
        unfinished.write(text)
    Path(unfinished.name).chmod(0o644)
    Path(unfinished.name).replace(out)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the examples and write what they print as Markdown.")
    parser.add_argument("--out", type=Path, help="the file to write; without it, the screen")
    parser.add_argument("--only", default="", help="run only examples whose name contains this, for example 13")
    arguments = parser.parse_args()
    examples = find(arguments.only)
    if not examples:
        parser.error(f"no example has {arguments.only!r} in its name; there are {', '.join(f.name for f in find(''))}")
    try:
        text = record(examples)
    except Failed as failure:
        print(f"nothing was written: {failure}", file=sys.stderr)
        return 1
    write(text, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
