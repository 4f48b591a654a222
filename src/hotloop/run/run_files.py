"""Files of a run beside its checkpoints: `run.json` with its settings, `report.html` and `report.json`."""

import inspect
import json
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from hotloop.device import Choice
from hotloop.device.backend import backend_of
from hotloop.errors import BadArgument, OutputError, PlanWarning
from hotloop.plan import Plan
from hotloop.printing.text import printable
from hotloop.records import Report
from hotloop.records.files import write_json, write_whole
from hotloop.version import __version__

FILE = "run.json"
GIT_PATIENCE = 2.0  # seconds for each question; a repository on a slow disk must not hold up the run
DEEPEST = 4  # of lists and dicts in arguments
LARGEST = 2**24  # bytes; more is no file of ours
MOST_PARTS = 100  # of a run that is resumed again and again, the last ones


def write_run(
    folder: Path, arguments: Mapping[str, Any], plan: Plan, choice: Choice, *, ranks: int = 1, resumed: bool = False
) -> None:
    """Write the settings of a run. Those of a part that resumes, which may differ, are added as `resumed`.

    A foreign file stays, and one that cannot be written is a warning: the run is worth more.
    """
    path = folder / FILE
    earlier = _earlier(path)
    if earlier is None and path.exists():
        warnings.warn(f"{printable(str(path))} does not belong to a run and stays as it is", PlanWarning, stacklevel=3)
        return
    data = describe_run(arguments, plan, choice, ranks=ranks)
    if resumed and earlier is not None:
        data = {**earlier, "resumed": [*earlier["resumed"], data][-MOST_PARTS:]}
    try:
        write_json(path, {"resumed": [], **data})
    except OutputError as error:
        warnings.warn(str(error), PlanWarning, stacklevel=3)


def write_report(folder: Path, report: Report, name: str) -> None:
    """Write the page of a run and its data; a later part of the run writes both again.

    Foreign files stay, and one that cannot be written is a warning: the run is worth more.
    """
    from hotloop.report.runs import DATA, PAGE, read_run  # noqa: PLC0415  # rich is loaded with it
    from hotloop.report.training_page import page, run_of  # noqa: PLC0415

    try:
        if (folder / PAGE).exists() or (folder / DATA).exists():
            read_run(folder)
        title = f"Training of {name}"
        write_json(folder / DATA, run_of(report, title).with_data(report.to_json()))
        write_whole(folder / PAGE, page({"": report}, title=title).encode(errors="backslashreplace"))
    except BadArgument:
        told = f"{printable(str(folder / PAGE))} does not belong to a run and stays as it is"
        warnings.warn(told, PlanWarning, stacklevel=3)
    except OutputError as error:
        warnings.warn(str(error), PlanWarning, stacklevel=3)


def describe_run(arguments: Mapping[str, Any], plan: Plan, choice: Choice, *, ranks: int = 1) -> dict[str, Any]:
    """The settings of a run as plain data, None where unknown; no synchronization.

    Environment variables and the command line are not part of it: they may hold secrets.
    """
    script = _script()
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "script": None if script is None else str(script),
        "git": _git(Path.cwd() if script is None else script.parent),
        "arguments": {name: _plain(value) for name, value in arguments.items()},
        "plan": _plain(plan.to_json()),
        "seed": torch.initial_seed(),  # the states of all generators are in the checkpoints
        "device": str(choice.device),
        "device_name": choice.name,
        "ranks": ranks,
        "host": platform.node() or None,
        "platform": platform.platform(),
        "versions": {
            "hotloop": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "cudnn": backend_of(choice.device).cudnn_version(),
        },
    }


def _plain(value: Any, depth: int = 0) -> Any:
    """A value as JSON; the type or name of one that JSON cannot hold.

    >>> _plain({"epochs": 3, "save": Path("runs"), "metrics": {"accuracy": print}, "loader": iter([])})
    {'epochs': 3, 'save': 'runs', 'metrics': {'accuracy': '<print>'}, 'loader': '<list_iterator>'}
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | Path):
        return str(value)
    if type(value) in (list, tuple) and depth < DEEPEST:
        return [_plain(each, depth + 1) for each in value]
    if type(value) is dict and depth < DEEPEST:
        return {str(name): _plain(each, depth + 1) for name, each in value.items()}
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    module = named.__module__
    return f"<{named.__qualname__}>" if module in (None, "builtins") else f"<{module}.{named.__qualname__}>"


def _script() -> Path | None:
    """The program that runs; None in a notebook or a prompt."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).absolute() if isinstance(file, str) else None


def _git(folder: Path) -> dict[str, Any] | None:
    """The commit of a folder and whether tracked files differ from it; None where it is in no repository."""
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*words: str) -> str | None:
        command = [git, "--no-optional-locks", "-C", str(folder), *words]
        try:
            told = subprocess.run(  # noqa: S603
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=GIT_PATIENCE
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        return told.stdout.strip()

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return None
    # Untracked files do not count: the checkpoints of this run are often among them.
    changed = ask("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _earlier(path: Path) -> dict[str, Any] | None:
    """The file of an earlier part of the run; None where there is none of hotloop's."""
    try:
        data = json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size <= LARGEST else None
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and isinstance(data.get("resumed"), list) else None
