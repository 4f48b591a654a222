"""`hotloop profile`: where the time of an unmodified script's training steps goes, line by line."""

import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import Json, Module, NewFolder, Script
from hotloop.cli.output import command_line, console, print_json, say, show_files
from hotloop.errors import INTERRUPTED, BadArgument
from hotloop.printing.text import printable

if TYPE_CHECKING:
    from hotloop.profiling.profile_record import Profile
    from hotloop.scripts.children import Child
    from hotloop.scripts.exchange import Exchange

PROFILE_GRACE = 30.0  # seconds for a script to end once its profile is written
FILES = {
    "report.html": "the page, for a browser",
    "trace.json.gz": "every event, for Perfetto or Chrome",
    "report.json": "all of the page as data",
}


app = typer.Typer(add_completion=False)


@app.command("profile", cls=Verb, context_settings={"allow_interspersed_args": False})
def profile(
    command: Script,
    module: Module = False,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps to profile.")] = 20,
    warmup: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Warm-up steps.", show_default="until step times settle")
    ] = None,
    out: NewFolder = None,
    ceilings: Annotated[
        bool, typer.Option("--ceilings/--no-ceilings", help="Also measure the peak speed of the device.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Show where the time of a script's training steps goes, by your own lines.

    The script needs no change: hotloop finds steps by the optimizers, or by your own updates of parameters. After some
    warm-up steps it profiles the next ones, then ends the script as Ctrl-C would, so that its clean-up runs. Files that
    the script writes, moves or removes stay as they are: it finds what it saved itself, and that goes with the run.
    Options of `hotloop profile` stand before the script's name, the script's own after it.

    The page shows the shares of waiting for data, copies, gaps and compute in a step; the lines of your code that cost
    most; where the host synchronizes; and memory over time.

    [bold]Examples[/bold]
      hotloop profile train.py --epochs 3         [dim]then open runs/.../report.html[/dim]
      hotloop profile --steps 50 train.py
      hotloop profile -m project.train            [dim]as python -m would run it[/dim]
      hotloop profile --json train.py > profile.json
    """
    from hotloop.profiling.profiled_script import TRACE
    from hotloop.report.runs import DATA, PAGE, new_run
    from hotloop.scripts.children import unwound_by_signals

    target, *arguments = command
    if not module and not Path(target).is_file():
        raise BadArgument(f"there is no file {printable(target)}", fix="give the script as you would give it to python")
    with unwound_by_signals(), new_run(out) as run, tempfile.TemporaryDirectory(prefix="hotloop-") as folder:
        found, trace = _profiled(target, arguments, folder, (steps, warmup), module=module, as_json=as_json)
        if ceilings:
            say(console(stderr=True), "measuring the peak speed of the device")
            found = _with_ceilings(found)
        from hotloop.report.profile_page import profile_page, profile_run

        words = command_line()
        run.write(PAGE, profile_page(found, command=words))
        run.write(TRACE, trace)
        run.write_json(DATA, profile_run(found).with_data({"command": words, "profile": found.to_json()}))
    if as_json:
        print_json({"folder": str(run.path), **found.to_json()})
    else:
        _show(found, run.path)


def _profiled(
    target: str,
    arguments: list[str],
    folder: str,
    counts: tuple[int, int | None],
    *,
    module: bool,
    as_json: bool,
) -> "tuple[Profile, bytes]":
    """Run the script in a process of its own; its output goes where it would go, or past the JSON to stderr."""
    from hotloop.profiling.profile_record import Profile
    from hotloop.profiling.profiled_script import PROFILE, TRACE, ProfileRequest, ScriptDied
    from hotloop.scripts.children import Child
    from hotloop.scripts.exchange import Exchange

    exchange = Exchange(Path(folder))
    exchange.ask(ProfileRequest(target, tuple(arguments), *counts, module).to_json())
    # Without the lines that the profiler's own library writes at every start and stop.
    quiet = {"KINETO_LOG_LEVEL": "9", **os.environ}
    command = exchange.command("hotloop.profiling.profiled_script")
    with Child(command, env=quiet, stdout=sys.stderr if as_json else None) as child:
        code = _end_of(child, exchange)
    answer = exchange.answered
    if answer is None:
        if code == -signal.SIGINT:  # Ctrl-C before the script had begun
            raise typer.Exit(INTERRUPTED)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        raise ScriptDied(
            f"the process that ran {printable(target)} {how} before its steps were profiled",
            fix="look for the cause in its output above",
        )
    if answer[PROFILE] is None:
        raise typer.Exit(code)
    return Profile.from_json(answer[PROFILE]), Path(folder, TRACE).read_bytes()


def _end_of(child: "Child", exchange: "Exchange") -> int:
    """Wait for the script. One that does not end though its profile is there is ended."""
    interrupted = False
    while True:
        try:
            code = exchange.end(lambda: child.wait(1.0), grace=PROFILE_GRACE)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            child.interrupt()
            continue
        if code is not None:
            return code
        child.end(grace=PROFILE_GRACE)


def _with_ceilings(found: "Profile") -> "Profile":
    """Measured now that the script has ended, and the device is free."""
    import torch

    from hotloop.profiling.ceilings import ceilings

    return replace(found, ceilings=ceilings(torch.device(found.device)))


def _show(found: "Profile", folder: Path) -> None:
    from hotloop.report.profile_page import profile_summary

    words = console()
    words.print()
    words.print(profile_summary(found))
    words.print()
    show_files(words, folder, FILES)
