"""`hotloop generate`: new sprites from a trained drawer."""

from pathlib import Path
from typing import Annotated

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import Classes, Device, Json, Scale, Seed
from hotloop.cli.output import console, counting, must_be_writable, print_json, say
from hotloop.errors import BadArgument
from hotloop.printing.text import duration, plural

app = typer.Typer(add_completion=False)


@app.command("generate", cls=Verb)
def generate(
    classes: Classes = None,
    number: Annotated[int, typer.Option("--count", "-n", metavar="N", help="Sprites of each class.")] = 64,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The contact sheet, a PNG.")] = Path(
        "sheet.png"
    ),
    model: Annotated[
        Path, typer.Option("--model", "-m", metavar="FILE", help="A drawer from `hotloop train draw`.")
    ] = Path("drawer.safetensors"),
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the sprites as a set (safetensors).")
    ] = None,
    columns: Annotated[int, typer.Option(metavar="N", help="Sprites in a row of the sheet.")] = 16,
    scale: Scale = 4,
    steps: Annotated[int, typer.Option(metavar="N", help="Drawing steps; more give finer details.")] = 16,
    temperature: Annotated[float, typer.Option(metavar="X", help="Lower is cleaner, higher is more varied.")] = 0.7,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Draw new sprites with a trained network, as a contact sheet.

    [bold]Examples[/bold]
      hotloop generate --class potion --count 64 --out sheet.png
      hotloop generate -c sword -c ship -n 16     [dim]a row of each[/dim]
      hotloop generate --data new.safetensors     [dim]also as data[/dim]
    """
    import time

    import torch

    from hotloop import pick
    from hotloop.apps.sprites.dataset import label_of
    from hotloop.apps.sprites.drawing import must_be_drawable
    from hotloop.apps.sprites.network_files import TrainedNetwork
    from hotloop.apps.sprites.pictures import must_fit_a_sheet, save_png, sheet_of
    from hotloop.apps.sprites.quality import drawn_by

    if min(number, columns, scale) < 1:
        raise BadArgument(f"count={number}, columns={columns}, scale={scale}", fix="give whole numbers of at least 1")
    must_be_drawable(steps, temperature)
    must_be_writable(out, data, model, suffix=".png")
    if data is not None:
        must_be_writable(data, model, option="--data", suffix=".safetensors")
    where = pick(device).device
    trained = TrainedNetwork.load(model, "drawer", where)
    labels = torch.tensor([label_of(name, trained.classes) for name in classes or trained.classes])
    must_fit_a_sheet(number * len(labels), scale)
    start = time.perf_counter()
    with counting("drawing") as progress:
        each = labels.repeat_interleave(number)
        drawn = drawn_by(trained, each, where, seed=seed, steps=steps, temperature=temperature, progress=progress)
    seconds = time.perf_counter() - start
    save_png(out, sheet_of(drawn, min(columns, number), scale))
    if data is not None:
        drawn.save(data)
    if as_json:
        print_json({"out": str(out), "sprites": len(drawn), "seconds": seconds, "device": str(where)})
    else:
        say(console(), f"{plural(len(drawn), 'sprite')} in {duration(seconds)} on {where}: {out}")
