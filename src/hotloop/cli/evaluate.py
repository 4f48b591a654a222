"""`hotloop evaluate`: metrics of the model that a person's own file builds, on the data that it holds out."""

from pathlib import Path
from typing import Annotated

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import Device, Json, Target
from hotloop.cli.output import console, print_json, say
from hotloop.errors import BadArgument
from hotloop.printing.text import metric

app = typer.Typer(add_completion=False)


@app.command("evaluate", cls=Verb)
def evaluate(
    target: Target,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            "-w",
            metavar="PATH",
            help="A folder of --save, a checkpoint in it, or a file of safetensors or torch.save.",
            show_default="as build() made them",
        ),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Of a folder, the best checkpoint instead of the last.")] = False,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Measure a trained model: the loss and the metrics of your own file, on the data that it holds out.

    The function is that of [bold]hotloop train[/bold]. The data and the metrics are what it gives as "validate",
    "metrics" and "predict"; without "validate", the data is its loader.

    [bold]Examples[/bold]
      hotloop evaluate train.py:build --weights runs/a
      hotloop evaluate train.py:build --weights runs/a --best
      hotloop evaluate train.py:build -w model.safetensors --json
    """
    from hotloop import load_weights
    from hotloop.cli.building import build, explained

    if best and weights is None:
        raise BadArgument("--best without --weights", fix="give the folder of the run: --weights runs/a --best")
    loop, loader, settings = build(target, device)
    words = console(stderr=as_json)
    say(words, f"{loop.device}: {loop.choice.reason}")
    held_out = settings.get("validate")
    if held_out is None and settings.get("device_transform") is not None:
        raise BadArgument(
            'there is no "validate", and the loader alone is not what the model takes: a device_transform changes it',
            fix='return (loop, loader, {"validate": held_out})',
        )
    if weights is not None:
        load_weights(loop.model, weights, "best" if best else "last")
    predict = {"predict": settings["predict"]} if settings.get("predict") else {}
    with explained(target):
        found = loop.evaluate(loader if held_out is None else held_out, settings.get("metrics"), **predict)
    if as_json:
        data = {"weights": None if weights is None else str(weights), "held_out": held_out is not None}
        print_json({**data, "device": str(loop.device), "metrics": found})
        return
    say(words, f"on the {'data that it trains on' if held_out is None else 'validation data'}:")
    width = max(map(len, found))
    for name, value in found.items():
        say(words, f"{name:<{width}}  {metric(name, value)}", indent="  ", style="bold")
