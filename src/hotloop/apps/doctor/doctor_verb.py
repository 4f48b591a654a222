"""`hotloop doctor`: what slows an unmodified script down, each fix as a diff with its gain, measured."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import Json, Module, NewFolder, Script
from hotloop.cli.output import command_line, console, print_json, say, show_files
from hotloop.errors import INTERRUPTED, BadArgument, OutputError
from hotloop.printing.text import printable

if TYPE_CHECKING:
    from hotloop.apps.doctor.diagnosis import Diagnosis

PATCH = "fixes.patch"
FILES = {
    "report.html": "the page, for a browser",
    PATCH: "all confirmed fixes, for patch -p1 or git apply",
    "report.json": "all of the page as data",
}


app = typer.Typer(add_completion=False)


@app.command("doctor", cls=Verb, context_settings={"allow_interspersed_args": False})
def doctor(
    command: Script,
    module: Module = False,
    turns: Annotated[int, typer.Option(metavar="N", min=2, help="Runs with and without each fix.")] = 3,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Steps timed in a run.", show_default="about two seconds")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Write the confirmed fixes into your files.")] = False,
    out: NewFolder = None,
    as_json: Json = False,
) -> None:
    """Find what slows a training script down, and measure each fix on the script itself.

    The script needs no change. hotloop looks at some of its steps, then runs it again and again for a few steps, in
    turns with and without each fix. It reports by file and line: what is wrong, the fix as a diff, and what that gave.
    A fix is confirmed only if its turns were faster, or needed less memory, by more than the noise, and losses agree.

    The script runs some twenty times. Files that the script writes, moves or removes stay as they are: each run finds
    what it saved itself, and that goes with the run. Your sources stay as they are, unless you give --apply. Options of
    `hotloop doctor` stand before the script's name, the script's own after it.

    [bold]Examples[/bold]
      hotloop doctor train.py --epochs 3
      hotloop doctor --apply train.py             [dim]and write the confirmed fixes[/dim]
      hotloop doctor --turns 5 --steps 100 train.py   [dim]on a busy machine[/dim]
      hotloop doctor -m project.train             [dim]as python -m would run it[/dim]
      hotloop doctor --json train.py > diagnosis.json
    """
    from hotloop.apps.doctor.diagnosis_page import diagnosis_page, diagnosis_run
    from hotloop.apps.doctor.examination import Examination
    from hotloop.report.runs import DATA, PAGE, new_run
    from hotloop.scripts.children import unwound_by_signals

    target, *arguments = command
    if not module and not Path(target).is_file():
        raise BadArgument(f"there is no file {printable(target)}", fix="give the script as you would give it to python")
    with unwound_by_signals(), new_run(out) as run:
        try:
            with _progress() as told:
                examination = Examination(target, arguments, module=module, turns=turns, steps=steps, told=told)
                found = examination.run()
        except KeyboardInterrupt:
            print("hotloop: stopped; your files are unchanged", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        words = command_line()
        run.write(PAGE, diagnosis_page(found, command=words))
        run.write_json(DATA, diagnosis_run(found).with_data({"command": words, "diagnosis": found.to_json()}))
        if found.diff:
            run.write(PATCH, found.diff.encode())
        written = _write(examination.changed) if apply else []
    if as_json:
        print_json({"folder": str(run.path), "changed": written, **found.to_json()})
    else:
        _show(found, run.path, written)


def _write(changed: dict[Path, tuple[str, str]]) -> list[str]:
    """Write the fixes, but nothing if a file is not what was examined any more."""
    from hotloop.records.files import write_whole

    for file, (before, _) in changed.items():
        if file.read_bytes() != before.encode():
            raise OutputError(
                f"{printable(str(file))} was changed while it was examined, so nothing was written",
                fix="run the doctor again",
            )
    written: list[Path] = []
    try:
        for file, (_, after) in changed.items():
            mode = file.stat().st_mode
            write_whole(file, after.encode())
            written.append(file)
            file.chmod(mode)
    except BaseException:  # all of them or none
        for file in written:
            write_whole(file, changed[file][0].encode())
        raise
    return [str(file) for file in changed]


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What runs now, on stderr; where that is no terminal, a line for each thing that is tried for the first time."""
    from rich.text import Text

    where, runs, said = console(stderr=True), count(1), set[str]()
    with where.status("") if where.is_terminal else nullcontext() as status:

        def tell(what: str) -> None:
            if status is not None:
                status.update(Text(printable(f"run {next(runs)}: {what}")))
            elif what not in said:
                print(f"hotloop: {printable(what)}", file=sys.stderr, flush=True)
                said.add(what)

        yield tell


def _show(found: "Diagnosis", folder: Path, written: list[str]) -> None:
    from hotloop.apps.doctor.diagnosis_page import diagnosis_words

    words = console()
    words.print()
    words.print(diagnosis_words(found))
    words.print()
    show_files(words, folder, FILES)
    if written:
        say(words, f"Changed: {', '.join(written)}")
    elif found.diff:
        fixes = "fix" if found.fixes == 1 else f"{found.fixes} fixes"
        say(words, f"To write the {fixes} into your files: `{_patching(folder, found.diff)}`")


def _patching(folder: Path, diff: str) -> str:
    """The command that applies the patch from here; names of files that lie elsewhere begin at the root."""
    names = [line.removeprefix("--- a/").rstrip() for line in diff.splitlines() if line.startswith("--- a/")]
    where = "" if all(Path(name).exists() for name in names) else " -d /"
    return f"patch{where} -p1 < {folder / PATCH}"
