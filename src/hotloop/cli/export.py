"""`hotloop export`: the weights of a checkpoint as one safetensors file."""

from pathlib import Path
from typing import Annotated

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import Json
from hotloop.cli.output import console, must_be_writable, print_json, say
from hotloop.printing.text import size

app = typer.Typer(add_completion=False)


@app.command("export", cls=Verb)
def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder of `fit(save=…)`, or one checkpoint in it.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The safetensors file to write.")] = Path(
        "model.safetensors"
    ),
    best: Annotated[bool, typer.Option("--best", help="Export the best checkpoint instead of the latest.")] = False,
    as_json: Json = False,
) -> None:
    """Export the model weights of a checkpoint as one safetensors file.

    One process without a GPU is enough, however many ranks wrote the checkpoint. The file has the names of
    [bold]model.state_dict()[/bold].

    [bold]Examples[/bold]
      hotloop export runs/a               [dim]the latest, as model.safetensors[/dim]
      hotloop export runs/a --best -o best.safetensors
      hotloop export runs/a/step-000012000
    """
    from hotloop.checkpoint.weights import export_weights

    must_be_writable(out, suffix=".safetensors")
    found = export_weights(checkpoint, out, best=best)
    if as_json:
        print_json({"out": str(out), "checkpoint": str(found), "bytes": out.stat().st_size})
    else:
        say(console(), f"{out}: {size(out.stat().st_size)}, from {found}")
