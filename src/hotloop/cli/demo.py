"""`hotloop demo`: a first training, with a report and pictures at the end of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.output import console, print_json, say
from hotloop.text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from hotloop.device import Choice
    from hotloop.records import Report

INTERRUPTED = 130  # what a shell reports for Ctrl-C
FILES = {
    "report.html": "the page, for a browser",
    "report.json": "the same as data",
    "loss.png": "the loss curve",
    "spirals.png": "what it learned, in pictures",
}


def demo(
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write here, to a new or empty folder.", show_default="runs/ and the time"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", "-d", metavar="NAME", help="auto, cuda, cuda:1, mps, xpu or cpu.", show_default="the best here"
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(metavar="N", help="How often to go through the data.")] = 12,
    points: Annotated[int, typer.Option(metavar="N", help="Points to learn from.")] = 6000,
    seed: Annotated[int, typer.Option(metavar="N", help="Another seed, other points and another start.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; progress goes to stderr.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the folder.")] = False,
) -> None:
    """Train a small network and see what it learned: a first run, in seconds.

    The data is made up, so nothing is downloaded: points on five spiral arms.
    The network learns which arm a point is on, and is judged by points that it
    never saw. It runs on the best device here and says why that one.

    The folder holds [bold]report.html[/bold] (open it in a browser), report.json, loss.png
    and spirals.png. It appears only when all is written. Ctrl-C ends the
    training early and still writes what was done.

    [bold]Examples[/bold]
      hotloop demo                    [dim]train, then open runs/.../report.html[/dim]
      hotloop demo -d cpu --epochs 4  [dim]on the CPU, and shorter[/dim]
      hotloop demo --out first        [dim]write to the folder `first`[/dim]
      hotloop demo --json | jq .seconds
    """
    from hotloop.demo import run_demo

    words = console(stderr=as_json)

    def tell(choice: "Choice") -> None:
        if not quiet:
            _tell_device(words, choice)

    report, folder = run_demo(
        out,
        device=device,
        epochs=epochs,
        points=points,
        seed=seed,
        progress=False if quiet else None,
        tell=tell,
    )
    if as_json:
        _print_report(report, folder)
    elif quiet:
        typer.echo(folder)
    else:
        _show(words, report, folder)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)


def _tell_device(words: "Console", choice: "Choice") -> None:
    name = f" ({choice.name})" if choice.name else ""
    say(words, f"Training on {choice.device}{name}", style="bold")
    say(words, choice.reason, indent="  ")
    words.print()


def _print_report(report: "Report", folder: Path) -> None:
    from hotloop.report.folder import finite

    print_json({"folder": str(folder), **finite(report.to_json())})


def _show(words: "Console", report: "Report", folder: Path) -> None:
    """The summary, where the files are, and what to try next."""
    from hotloop.report.table import summary

    words.print()
    words.print(summary(report, "hotloop demo"))
    words.print()
    _show_files(words, folder)
    words.print()
    say(words, "Next:")
    say(words, "`hotloop device` shows what your hardware can do", indent="  ")
    say(words, "`hotloop demo --help` lists what can be set", indent="  ")
    say(words, "examples/ in the repository has the same loop in your own code, and docs/ explains it", indent="  ")


def _show_files(words: "Console", folder: Path) -> None:
    from rich.text import Text

    say(words, "Written:")
    paths = {printable(str(folder / name)): what for name, what in FILES.items()}
    width = max(map(len, paths))
    for path, what in paths.items():
        words.print(Text.assemble(f"  {path:<{width}}", (f"  {what}", "dim")), soft_wrap=True)
