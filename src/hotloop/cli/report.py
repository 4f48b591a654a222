"""`hotloop report`: the runs that were kept, and any two of them side by side."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import Json
from hotloop.cli.output import console, print_json, say

app = typer.Typer(add_completion=False)


@app.command("report", cls=Verb)
def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FOLDER", help="A folder of runs to list, or two runs to compare.", show_default="runs"),
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs, or compare two of them.

    Every run (train, demo, tune, bench, profile) writes [bold]report.html[/bold] for a browser and the same data in
    [bold]report.json[/bold]. A comparison shows the figures that both runs have; × is the second over the first, green
    if it is better.

    [bold]Examples[/bold]
      hotloop report                              [dim]those in runs/, the latest first[/dim]
      hotloop report runs/before runs/after       [dim]side by side[/dim]
      hotloop report runs --json
    """
    from hotloop.errors import BadArgument
    from hotloop.report.runs import RUNS

    places = folders or [RUNS]
    if len(places) > 2:
        raise BadArgument(f"{len(places)} folders were given", fix="give one to list, or two runs to compare")
    _list(places[0], as_json) if len(places) == 1 else _compare(places[0], places[1], as_json)


def _list(folder: Path, as_json: bool) -> None:
    from hotloop.report.runs import RUNS, kept_in, runs_list

    none_yet = folder == RUNS and not folder.exists()  # the first run makes it
    runs, failed = ([], []) if none_yet else kept_in(folder)
    for why in failed:
        what, *fix = why.splitlines()
        say(console(stderr=True), f"left out: {what}")
        for line in fix:
            say(console(stderr=True), line.strip(), indent="  ")
    if as_json:
        print_json({"runs": [{"folder": str(kept.folder), **kept.run.to_json()} for kept in runs], "failed": failed})
        return
    words = console()
    if not runs:
        say(words, f"no run is in {folder} yet: `hotloop train train.py:build` makes one")
        return
    words.print(runs_list(runs))
    if len(runs) > 1:
        command = shlex.join(["hotloop", "report", str(runs[1].folder), str(runs[0].folder)])
        say(words, f"Compare two: `{command}`")


def _compare(first: Path, second: Path, as_json: bool) -> None:
    from hotloop.report.runs import comparison, read_run

    a, b = read_run(first), read_run(second)
    if as_json:
        names = dict.fromkeys([*a.run.figures, *b.run.figures])
        figures = {name: [a.run.figures.get(name), b.run.figures.get(name)] for name in names}
        print_json({"runs": [a.run.to_json(), b.run.to_json()], "figures": figures})
        return
    console().print(comparison(a, b))
