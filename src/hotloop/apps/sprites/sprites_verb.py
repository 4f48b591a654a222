"""`hotloop sprites`: make, look at and import sets of sprites; the networks are in networks_verb.py."""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotloop.apps.sprites.networks_verb import Classes, Data, Scale
from hotloop.apps.sprites.networks_verb import app as networks
from hotloop.apps.sprites.verb_parts import Seed, counting
from hotloop.cli.help import Verb, Verbs
from hotloop.cli.options import Json
from hotloop.cli.output import console, must_be_writable, print_json, say
from hotloop.errors import BadArgument
from hotloop.printing.text import count, duration

if TYPE_CHECKING:
    from hotloop.apps.sprites.dataset import SpriteSet

app = typer.Typer(
    add_completion=False,
    cls=Verbs,
    help="Make and import sets of pixel-art sprites; train networks that classify them or draw new ones.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Out = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write.")]


@app.command(cls=Verb)
def make(
    number: Annotated[int, typer.Option("--count", "-n", metavar="N", help="How many sprites.")] = 8192,
    seed: Seed = 0,
    classes: Classes = None,
    out: Out = Path("sprites.safetensors"),
    as_json: Json = False,
) -> None:
    """Make training data: sprites drawn by rules, without a network.

    [bold]Examples[/bold]
      hotloop sprites make                        [dim]8,192 of all classes[/dim]
      hotloop sprites make -n 100000 --seed 7 -o big.safetensors
      hotloop sprites make -c sword -c potion     [dim]two classes only[/dim]
    """
    import time

    from hotloop.apps.sprites.making import make as draw_by_rules

    must_be_writable(out, suffix=".safetensors")
    start = time.perf_counter()
    with counting("making") as progress:
        made = draw_by_rules(number, seed=seed, classes=classes, progress=progress)
    seconds = time.perf_counter() - start
    made.save(out)
    if as_json:
        print_json({"out": str(out), "seconds": seconds, **about(made)})
        return
    words = console()
    say(words, f"{count(len(made))} sprites of {len(made.classes)} classes in {duration(seconds)}: {out}")
    say(words, f"Look at them: `hotloop sprites preview {shlex.quote(str(out))}`")


@app.command(cls=Verb)
def preview(
    data: Data = None,
    out: Out = Path("preview.png"),
    columns: Annotated[int, typer.Option(metavar="N", help="Sprites of each class, side by side.")] = 16,
    scale: Scale = 4,
    classes: Classes = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write a contact sheet: one row for each class.

    [bold]Examples[/bold]
      hotloop sprites preview                     [dim]what hotloop draws[/dim]
      hotloop sprites preview art.safetensors -o art.png --scale 6
    """
    from hotloop.apps.sprites.making import CLASSES, load_or_make
    from hotloop.apps.sprites.pictures import must_fit_a_sheet, save_png, sheet_of

    if columns < 1 or scale < 1:
        raise BadArgument(f"columns={columns}, scale={scale}", fix="give whole numbers of at least 1")
    must_be_writable(out, data, suffix=".png")
    rows = len(set(classes)) if classes else len(CLASSES) if data is None else 1
    must_fit_a_sheet(columns * rows, scale)
    sprites = load_or_make(data, columns * rows, seed, classes)
    each = sprites.labels.bincount()
    columns = min(columns, int(each.max()))
    number = int(each.clamp(max=columns).sum())
    save_png(out, sheet_of(sprites.rows(columns), columns, scale))
    if as_json:
        print_json({"out": str(out), "shown": number, **about(sprites)})
    else:
        say(console(), f"{count(number)} sprites, a row for each of {len(sprites.classes)} classes: {out}")


@app.command("import", cls=Verb)
def import_(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A folder of images (subfolders are classes), or one sheet.")
    ],
    out: Out = Path("art.safetensors"),
    tile: Annotated[str | None, typer.Option(metavar="WxH", help="Size of the tiles of a sheet, as 16x16.")] = None,
    margin: Annotated[int, typer.Option(metavar="N", help="Pixels around the tiles of a sheet.")] = 0,
    spacing: Annotated[int, typer.Option(metavar="N", help="Pixels between the tiles of a sheet.")] = 0,
    as_json: Json = False,
) -> None:
    """Import pixel art as a set: crisp, in 16 colours, with nothing resampled.

    Images of 16x16 stay as they are, clean enlargements are reduced, smaller ones are centred. Unusable images are
    named with the reason; a damaged file never ends the import.

    [bold]Examples[/bold]
      hotloop sprites import my-art/              [dim]classes are the subfolders[/dim]
      hotloop sprites import sheet.png --tile 16x16 --spacing 1
    """
    from hotloop.apps.sprites.importing import import_art

    size = tile_of(tile)
    must_be_writable(out, source, suffix=".safetensors")
    with counting("reading") as progress:
        result = import_art(source, tile=size, margin=margin, spacing=spacing, progress=progress)
    result.sprites.save(out)
    if as_json:
        skipped = [vars(each) for each in result.skipped]
        print_json({"out": str(out), "duplicates": result.duplicates, "skipped": skipped, **about(result.sprites)})
        return
    words = console()
    for line in result.summary:
        say(words, line)
    say(words, f"Written: {out}. Look at it: `hotloop sprites preview {shlex.quote(str(out))}`")


def about(sprites: "SpriteSet") -> dict[str, Any]:
    """What there is to say of a set."""
    counts = sprites.labels.bincount(minlength=len(sprites.classes)).tolist()
    return {
        "sprites": len(sprites),
        "classes": dict(zip(sprites.classes, counts, strict=True)),
        "colours": int((sprites.pixels.unique() > 0).sum()),
        "source": sprites.source,
    }


def tile_of(text: str | None) -> tuple[int, int] | None:
    """`16x16` as numbers."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", text.lower())
    if found is None:
        raise BadArgument(f"--tile {text!r}", fix="give width and height in pixels, as 16x16")
    return int(found[1]), int(found[2])


app.add_typer(networks)  # the verbs of networks stand after those of sets
