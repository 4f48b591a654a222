"""What the verbs print: words for people, or one JSON object for programs."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotloop.errors import OutputError
from hotloop.printing.text import COMMAND, printable, wrap

if TYPE_CHECKING:
    from rich.console import Console

    from hotloop.records import Report as Training
    from hotloop.report.runs import Run


def console(*, stderr: bool = False) -> "Console":
    """Where words go: stdout, or stderr where stdout is kept for JSON."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def say(where: "Console", words: str, *, indent: str = "", style: str = "") -> None:
    """A paragraph, wrapped between words but never inside a `command`."""
    from rich.text import Text

    for line in wrap(printable(words), where.width, indent):
        said = Text(line, style=style)
        said.highlight_regex(COMMAND, "bold cyan")
        where.print(said, soft_wrap=True)


def must_be_writable(path: Path, *others: Path | None, option: str = "--out", suffix: str | None = None) -> None:
    """Refuse a file that could not be written, before the work that would fill it.

    `others` are files that the same command reads or writes; `suffix` is that of the only format there is.
    """
    name, folder = printable(str(path)), printable(str(path.parent))
    if not path.parent.is_dir():
        raise OutputError(f"there is no folder {folder}", fix=f"make it first, or choose another {option}")
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a device or a pipe"
        raise OutputError(f"{name} is {what}", fix=f"choose the name of a file for {option}")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"{folder} is not writable", fix=f"choose another folder for {option}")
    if path.resolve() in {other.resolve() for other in others if other is not None}:
        raise OutputError(f"{name} was given twice and would be overwritten", fix=f"choose another {option}")
    if suffix is not None and path.suffix.lower() != suffix:
        raise OutputError(
            f"a {suffix} file is written, and {name} is not named like one",
            fix=f"choose a name that ends in {suffix} for {option}",
        )


def keep(page: str, run: "Run", data: dict[str, Any]) -> Path:
    """Write the page of a run and its data into a folder of its own; where the page is."""
    from hotloop.report.runs import DATA, PAGE, new_run

    with new_run() as folder:
        folder.write(PAGE, page)
        folder.write_json(DATA, run.with_data(data))
    return folder.path / PAGE


def keep_training(training: "Training", title: str, save: str | Path | None = None) -> Path:
    """The page of a training: what `fit` wrote beside the checkpoints, else a new one in a folder of its own."""
    from hotloop.report.runs import PAGE
    from hotloop.report.training_page import page, run_of

    if save is not None and (written := Path(save, PAGE)).is_file():
        return written
    html = page({"": training}, title=title, command=command_line())
    return keep(html, run_of(training, title), training.to_json())


def print_json(data: dict[str, Any]) -> None:
    """Exactly one object of strict JSON on stdout; a number that is not finite is null."""
    from hotloop.records.files import finite

    typer.echo(json.dumps(finite(data), indent=2, allow_nan=False))


def command_line() -> str:
    """What the person typed."""
    return shlex.join(["hotloop", *sys.argv[1:]])


def show_files(where: "Console", folder: Path, files: dict[str, str]) -> None:
    """Those of the files that were written, each with what it is for."""
    from rich.text import Text

    say(where, "Written:")
    paths = {printable(str(folder / name)): what for name, what in files.items() if (folder / name).exists()}
    width = max(map(len, paths))
    for path, what in paths.items():
        where.print(Text.assemble(f"  {path:<{width}}", (f"  {what}", "dim")), soft_wrap=True)
