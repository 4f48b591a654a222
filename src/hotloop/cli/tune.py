"""`hotloop tune`: try every lever on a training loop, and write the plan that was found."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import Device, Json, Report, Target
from hotloop.cli.output import command_line, console, keep, must_be_writable, print_json, say
from hotloop.errors import BadArgument
from hotloop.printing.text import printable

if TYPE_CHECKING:
    from hotloop.plan import Tuning


app = typer.Typer(add_completion=False)


@app.command("tune", cls=Verb)
def tune(
    target: Target,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps of the run to plan for.", show_default=False)
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(metavar="S", help="Or its length in plain PyTorch.", show_default="3600"),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write the plan, for Loop(plan=FILE).")
    ] = Path("plan.json"),
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also plot the gain of each lever, as a PNG.")
    ] = None,
    device: Device = None,
    report: Report = True,
    as_json: Json = False,
) -> None:
    """Find the fastest plan for a training loop on this machine, by measuring.

    hotloop times each lever (data on the device, CUDA graph, bf16, channels last, fused optimizer, compile, ...)
    against the best plan so far, in turns, with real steps, and restores the state afterwards. It keeps a lever that is
    faster by more than the noise, pays back its cost within the run, and keeps the gradient close to that of fp32. More
    levers pay in a longer run: say how long it will be.

    [bold]Examples[/bold]
      hotloop tune train.py:build                 [dim]build() returns (loop, loader)[/dim]
      hotloop tune train.py:build --steps 20000
      hotloop tune train.py:build --seconds 60 --plot way.png
    """
    if steps is not None and seconds is not None:
        raise BadArgument("both --steps and --seconds were given", fix="give one of them")
    if plot is not None and plot.resolve() == out.resolve():
        raise BadArgument("--out and --plot are the same file", fix="give the plan and the picture different names")
    must_be_writable(out)
    if plot is not None:
        must_be_writable(plot, option="--plot", suffix=".png")
    words = console(stderr=as_json)
    from hotloop.cli.building import build

    loop, loader, _ = build(target, device)
    say(words, f"{loop.device}: {loop.choice.reason}")
    tuning = loop.tune(loader, steps=steps, seconds=(3600 if steps is None else None) if seconds is None else seconds)
    _write(tuning, out, plot)
    kept = _kept(tuning) if report else None
    if as_json:
        print_json({"out": str(out), "report": None if kept is None else str(kept), **tuning.to_json()})
        return
    from hotloop.report.tuning import tuning_table, tuning_words

    words.print(tuning_table(tuning))
    say(words, tuning_words(tuning))
    say(words, f'Written: {printable(str(out))}. Use it with `hotloop.Loop(..., plan="{out}")`')
    if kept is not None:
        say(words, f"The page: {kept}")


def _write(tuning: "Tuning", out: Path, plot: Path | None) -> None:
    from hotloop.files.whole import write_json, write_whole
    from hotloop.report.tuning import waterfall

    write_json(out, tuning.to_json())
    if plot is not None:
        write_whole(plot, waterfall(tuning))


def _kept(tuning: "Tuning") -> Path:
    """The page and the data of the tuning; the page."""
    from hotloop.report.runs import PAGE
    from hotloop.report.tuning_page import tuning_page, tuning_run

    page = tuning_page(tuning, command_line())
    return keep(page, tuning_run(tuning), tuning.to_json()) / PAGE
