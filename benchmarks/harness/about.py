"""What a benchmark ran on: the hardware, the versions, the commit."""

import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from harness.records import Benchmark
from hotloop import __version__
from hotloop.device import pick
from hotloop.device.machine import cpu_name
from hotloop.printing.text import plural, printable

PACKAGES = ("accelerate", "lightning", "timm", "torchvision", "transformers")


def hardware(devices: Iterable[torch.device]) -> str:
    """The devices and the processor that serves them, in words."""
    gpus = [printable(pick(device).name) for device in devices if device.type != "cpu"]
    return ", ".join([*dict.fromkeys(gpus), f"{cpu_name()} with {plural(torch.get_num_threads(), 'thread')}"])


def slug(words: str) -> str:
    """A name for a folder.

    >>> slug("NVIDIA H200, Xeon(R) with 16 threads")
    'nvidia-h200-xeon-r-with-16-threads'
    """
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "unknown"


def versions() -> dict[str, str]:
    """Of everything that took part and is installed."""
    found = {"hotloop": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def facts(devices: Iterable[torch.device], command: str | None = None) -> dict[str, Any]:
    """What every result says of where it comes from."""
    return {
        "command": command or shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(devices),
        "versions": versions(),
    }


def begun(devices: Sequence[torch.device], command: str, *, quick: bool) -> Benchmark:
    """A benchmark that begins now: nothing is measured yet."""
    return Benchmark(
        **facts(devices, command),
        scores=(),
        curves=(),
        ceilings={},
        failures=(),
        quick=quick,
    )


def commit() -> str | None:
    """The commit of hotloop's own repository, marked where something is not committed; None where it is not in one."""
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*words: str) -> str:
        command = [git, "--no-optional-locks", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603

    try:
        if not ask("ls-files", Path(__file__).name):  # installed into someone else's repository
            return None
        return ask("rev-parse", "HEAD") + (" with changes" if ask("status", "--porcelain") else "")
    except subprocess.CalledProcessError:
        return None
