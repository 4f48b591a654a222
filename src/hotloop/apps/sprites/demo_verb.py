"""`hotloop demo`: sprites made, sorted and drawn, with a page to show for it."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.apps.sprites.verb_parts import Seed
from hotloop.cli.help import Verb
from hotloop.cli.options import Device, Json, NewFolder
from hotloop.cli.output import console, print_json, say, show_files
from hotloop.errors import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import Console

    from hotloop.apps.sprites.demo import Demo

FILES = {
    "report.html": "the page, for a browser",
    "sprites.png": "the training data",
    "drawn.png": "drawn by the network",
    "confusion.png": "what the classifier confuses",
    "report.json": "all of it as data",
    "classifier.safetensors": "the network that sorts",
    "drawer.safetensors": "the network that draws",
}


app = typer.Typer(add_completion=False)


@app.command("demo", cls=Verb)
def demo(
    out: NewFolder = None,
    device: Device = None,
    seed: Seed = 0,
    effort: Annotated[float, typer.Option(metavar="X", help="2 takes twice as long and draws better sprites.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Make sprites, train networks that sort and draw them, and show the result.

    Nothing is downloaded. It runs on the best device here and gives the reason: about two minutes on two slow CPU
    cores, with half of the classes, or on a GPU with all of them.

    The folder holds [bold]report.html[/bold] (open it in a browser), the pictures and both networks. It appears when
    everything is written. Ctrl-C ends the current training and still writes the results so far.

    [bold]Examples[/bold]
      hotloop demo                    [dim]then open runs/.../report.html[/dim]
      hotloop demo --effort 0.2       [dim]a quick look, rough sprites[/dim]
      hotloop demo -d cpu --out first [dim]on the CPU, to the folder `first`[/dim]
    """
    from hotloop.apps.sprites.demo import run_demo

    words = console(stderr=as_json)

    outcome = run_demo(out, device=device, seed=seed, effort=effort, tell=lambda what: say(words, what, style="bold"))
    if as_json:
        print_json({"folder": str(outcome.folder.path), **outcome.to_json()})
    else:
        _show(words, outcome)
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def _show(words: "Console", outcome: "Demo") -> None:
    """The numbers, where the files are, and what to try next."""
    from hotloop.apps.sprites.demo import headlines
    from hotloop.report.document import panel

    words.print()
    words.print(panel(headlines(outcome), "hotloop demo", stopped="Ctrl-C" if outcome.interrupted else None))
    words.print()
    show_files(words, outcome.folder.path, FILES)
    if outcome.drawing is not None:
        words.print()
        say(words, "Next:")
        model = shlex.quote(str(outcome.folder.path / "drawer.safetensors"))
        say(words, f"`hotloop sprites generate -m {model} --class sword` draws more", indent="  ")
        say(
            words,
            "`hotloop sprites import my-art/` and `hotloop sprites draw art.safetensors`: your own art",
            indent="  ",
        )
        say(
            words,
            "`hotloop device` shows what your hardware can do; `hotloop learn` teaches the loop in your own code",
            indent="  ",
        )
