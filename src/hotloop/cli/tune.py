"""`hotloop tune`: try every lever on a training loop, and write the plan that was found."""

from pathlib import Path
from typing import Annotated

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import Device, Json, Report, Target
from hotloop.cli.output import command_line, console, keep, must_be_writable, print_json, say
from hotloop.errors import BadArgument
from hotloop.printing.text import printable

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
      hotloop tune train.py:build --seconds 60
    """
    if steps is not None and seconds is not None:
        raise BadArgument("both --steps and --seconds were given", fix="give one of them")
    must_be_writable(out)
    words = console(stderr=as_json)
    from hotloop.cli.building import build
    from hotloop.records.files import write_json
    from hotloop.report.tuning import not_tried, tuning_page, tuning_run, tuning_table, tuning_words

    loop, loader, _ = build(target, device)
    say(words, f"{loop.device}: {loop.choice.reason}")
    tuning = loop.tune(loader, steps=steps, seconds=(3600 if steps is None else None) if seconds is None else seconds)
    write_json(out, tuning.to_json())
    kept = keep(tuning_page(tuning, command_line()), tuning_run(tuning), tuning.to_json()) if report else None
    if as_json:
        print_json({"out": str(out), "report": None if kept is None else str(kept), **tuning.to_json()})
        return
    words.print(tuning_table(tuning).in_terminal(wraps=(0, 6)))
    for line in not_tried(tuning):
        say(words, line, style="dim")
    say(words, tuning_words(tuning), style="bold")
    say(words, f'Written: {printable(str(out))}. Use it with `hotloop.Loop(..., plan="{out}")`')
    if kept is not None:
        say(words, f"The page: {kept}")
