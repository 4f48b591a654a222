"""`hotloop sprites`: make, look at, import and describe sets of sprites; the networks are in networks_verb.py."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotloop.apps.sprites.networks_verb import app as networks
from hotloop.apps.sprites.sprite_options import Classes, Data, Scale
from hotloop.cli.help import Verb, Verbs
from hotloop.cli.options import Json, Seed
from hotloop.cli.output import console, counting, must_be_writable, print_json, say
from hotloop.errors import BadArgument, OutputError
from hotloop.printing.text import count, duration, plural, printable

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
    from hotloop.apps.sprites.making import must_fit_memory

    must_be_writable(out, suffix=".safetensors")
    must_fit_memory(number, copies=3)
    must_fit_disk(out, number)
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
    must_fit_a_sheet(columns * len(sprites.classes), scale)
    each = sprites.labels.bincount()
    columns = min(columns, int(each.max()))
    number = int(each.clamp(max=columns).sum())
    shown = rows_of(sprites, columns)
    save_png(out, sheet_of(shown, columns, scale))
    if as_json:
        print_json({"out": str(out), "shown": number, "classes": list(shown.classes)})
    else:
        say(console(), f"{count(number)} sprites, a row for each of {len(shown.classes)} classes: {out}")


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
    from hotloop.apps.sprites.importing import import_folder, import_sheet

    size = tile_of(tile)
    if not source.exists():
        raise BadArgument(f"there is no {printable(str(source))}", fix="give a folder of images, or one sprite sheet")
    must_be_writable(out, source, suffix=".safetensors")
    if source.is_dir():
        with counting("reading") as progress:
            result = import_folder(source, tile=size, margin=margin, spacing=spacing, progress=progress)
    else:
        result = import_sheet(source, size or (16, 16), margin, spacing)
    result.sprites.save(out)
    if as_json:
        skipped = [vars(each) for each in result.skipped]
        print_json({"out": str(out), "duplicates": result.duplicates, "skipped": skipped, **about(result.sprites)})
        return
    words = console()
    for line in result.summary:
        say(words, line)
    say(words, f"Written: {out}. Look at it: `hotloop sprites preview {shlex.quote(str(out))}`")


@app.command(cls=Verb)
def info(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A set of sprites.")], as_json: Json = False
) -> None:
    """Describe a set: classes, counts, colours, source."""
    from hotloop.apps.sprites.dataset import SpriteSet

    told = about(SpriteSet.load(data))
    if as_json:
        print_json(told)
        return
    words = console()
    say(
        words,
        f"{data}: {count(told['sprites'])} sprites in {told['colours']} colours, {told['source'] or 'source unknown'}",
    )
    for name, number in told["classes"].items():
        say(words, f"{name:<12} {count(number):>9}", indent="  ")


def must_fit_disk(out: Path, number: int) -> None:
    """Refuse more sprites than the disk has room for, before they are made."""
    import shutil

    from hotloop.apps.sprites.making import EACH
    from hotloop.printing.text import size

    free = shutil.disk_usage(out.parent).free
    if number * EACH > free:
        raise OutputError(
            f"{plural(number, 'sprite')} take {size(number * EACH)} on disk, and {size(free)} are free",
            fix=f"ask for at most {free // EACH:,}, or choose a place on another disk for --out",
        )


def about(sprites: "SpriteSet") -> dict[str, Any]:
    """What there is to say of a set."""
    counts = sprites.labels.bincount(minlength=len(sprites.classes)).tolist()
    return {
        "sprites": len(sprites),
        "classes": dict(zip(sprites.classes, counts, strict=True)),
        "colours": int((sprites.pixels.unique() > 0).sum()),
        "source": sprites.source,
    }


def rows_of(sprites: "SpriteSet", columns: int) -> "SpriteSet":
    """The first few of each class, class after class; a class with fewer is filled up by going round."""
    import torch

    rows = []
    for label in range(len(sprites.classes)):
        own = (sprites.labels == label).nonzero().flatten()
        if len(own):
            rows.append(own[torch.arange(columns) % len(own)])
    return sprites[torch.cat(rows)]


def tile_of(text: str | None) -> tuple[int, int] | None:
    """`16x16` as numbers."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and len(part) < 10 and int(part) for part in parts):
        raise BadArgument(f"--tile {text!r}", fix="give width and height in pixels, as 16x16")
    return int(parts[0]), int(parts[1])


app.add_typer(networks)  # the verbs of networks stand after those of sets
