"""Run every example and write what they print into one Markdown file.

python examples/record.py docs/examples/cpu.md
"""

import argparse
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

import hotloop
from hotloop.records.files import write_whole

EXAMPLES = Path(__file__).resolve().parent
ROOT = EXAMPLES.parent
TIMEOUT = 300  # seconds for one example; each needs about ten


def output_of(example: Path) -> str:
    """What one example prints; one that fails ends the recording."""
    done = subprocess.run(  # noqa: S603  # our own files
        [sys.executable, str(example)],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        sys.exit(f"nothing was written: {example.name} ended with status {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout.strip()


def heading() -> str:
    """Where and when the record was made."""
    choice = hotloop.pick()
    hardware = f"{choice.name or 'unknown'} ({choice.device}), {os.cpu_count()} CPU cores"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"# The examples on {hardware}\n\n{versions}, {datetime.now(UTC):%Y-%m-%d}. Timings vary from run to run.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the examples and write what they print as Markdown.")
    parser.add_argument("out", type=Path, help="the file to write")
    out = parser.parse_args().out
    parts = [heading()]
    for example in sorted(EXAMPLES.glob("[0-9][0-9]_*.py")):
        print(f"running {example.name}", file=sys.stderr)
        parts.append(f"## {example.name}\n\n```text\n{output_of(example)}\n```\n")
    text = "\n".join(parts).replace(f"{ROOT}{os.sep}", "").replace(str(ROOT), ".").replace(str(Path.home()), "~")
    write_whole(out, text.encode())


if __name__ == "__main__":
    main()
