"""`hotloop sprites train|draw|evaluate|generate`: networks that classify sprites, and networks that draw new ones."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hotloop.apps.sprites.verb_parts import Seed, counting
from hotloop.cli.help import Verb
from hotloop.cli.options import Device, Json, Report
from hotloop.cli.output import console, keep_training, must_be_writable, print_json, say
from hotloop.errors import INTERRUPTED, BadArgument
from hotloop.printing.text import count, duration, plural, printable

if TYPE_CHECKING:
    import torch

    from hotloop.apps.sprites.network_files import TrainedNetwork

NEVER_SEEN = 2_000_003  # a seed that no training uses by itself

app = typer.Typer(add_completion=False)

Classes = Annotated[
    list[str] | None, typer.Option("--class", "-c", metavar="NAME", help="Only this class; may be given several times.")
]
Data = Annotated[
    Path | None,
    typer.Argument(metavar="DATA", help="A set of sprites; without one, hotloop makes sprites.", show_default=False),
]
Scale = Annotated[int, typer.Option(metavar="N", help="Size of a sprite's pixel, in pixels.")]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write the network.")]
Epochs = Annotated[
    int | None, typer.Option(metavar="N", help="Epochs of training.", show_default="what suits the device")
]


@app.command(cls=Verb)
def train(
    data: Data = None,
    out: Out = Path("classifier.safetensors"),
    device: Device = None,
    epochs: Epochs = None,
    classes: Classes = None,
    seed: Seed = 0,
    report: Report = True,
    as_json: Json = False,
) -> None:
    """Train a classifier of sprites and evaluate it on sprites that it never saw.

    Of your own sprites, every tenth is held out for evaluation.

    [bold]Examples[/bold]
      hotloop sprites train                             [dim]on sprites made for it[/dim]
      hotloop sprites train art.safetensors             [dim]on your own[/dim]
      hotloop sprites evaluate classifier.safetensors   [dim]how good is it?[/dim]
    """
    if classes is not None and len(set(classes)) == 1:
        raise BadArgument(
            f"--class {printable(classes[0])} alone, and a classifier has nothing to tell it apart from",
            fix="give --class once more for each other class, or leave it out for all",
        )
    _train("classify", data, out, device, epochs, classes, seed, report, as_json)


@app.command(cls=Verb)
def draw(
    data: Data = None,
    out: Out = Path("drawer.safetensors"),
    device: Device = None,
    epochs: Epochs = None,
    classes: Classes = None,
    seed: Seed = 0,
    report: Report = True,
    as_json: Json = False,
) -> None:
    """Train a network that draws new sprites of a class, in palette colours, so they are always crisp.

    [bold]Examples[/bold]
      hotloop sprites draw                          [dim]on sprites made for it[/dim]
      hotloop sprites draw art.safetensors --epochs 200
      hotloop sprites generate --class potion       [dim]new potions[/dim]
    """
    _train("draw", data, out, device, epochs, classes, seed, report, as_json)


def _train(
    task: Literal["classify", "draw"],
    data: Path | None,
    out: Path,
    device: str | None,
    epochs: int | None,
    classes: list[str] | None,
    seed: int,
    report: bool,
    as_json: bool,
) -> None:
    """Train a network and write it; what cannot work is told before the work begins."""
    from dataclasses import replace

    import torch

    from hotloop import pick
    from hotloop.apps.sprites.making import load_or_make, make
    from hotloop.apps.sprites.recipes import learn_to_draw, learn_to_sort, recipe_for, sprites_for
    from hotloop.report.training_page import summary

    must_be_writable(out, data, suffix=".safetensors")
    choice = pick(device)
    recipe = replace(recipe_for(task, choice.device), seed=seed)
    if epochs is not None:
        recipe = replace(recipe, epochs=epochs)
    sprites = load_or_make(data, sprites_for(choice.device), seed, classes)
    if data is None:
        held_out = make(4096, seed=seed + 1_000_003, classes=classes)
    else:
        tenth = torch.arange(len(sprites)) % 10 == 9
        sprites, held_out = sprites[~tenth], sprites[tenth] if bool(tenth.any()) else sprites
    words = console(stderr=as_json)
    say(words, f"{choice.device} in {choice.precision}: {choice.reason}")
    kinds = plural(len(sprites.classes), "class", "classes")
    say(words, f"{plural(len(sprites), 'sprite')} of {kinds} to learn from, {plural(recipe.epochs, 'epoch')}")
    if task == "classify":
        trained, training = learn_to_sort(sprites, held_out, recipe, device=device)
    else:
        trained, training = learn_to_draw(sprites, recipe, device=device)
    trained.save(out)
    kept = keep_training(training, f"A {trained.kind} for {kinds} of sprites") if report else None
    if as_json:
        about = {"out": str(out), "report": None if kept is None else str(kept), "classes": list(trained.classes)}
        print_json({**about, **training.to_json()})
    else:
        words.print(summary(training, f"hotloop sprites: {trained.kind}"))
        verb = "evaluate" if task == "classify" else "generate --model"
        then = f"hotloop sprites {verb} {shlex.quote(str(out))}"
        say(words, f"Written: {out}{'' if kept is None else f' and {kept}'}. Next: `{then}`")
    if training.interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command(cls=Verb)
def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A network that `hotloop sprites train` wrote.")],
    data: Data = None,
    judge: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For a drawer: the classifier that judges it.")
    ] = None,
    number: Annotated[int, typer.Option("--count", "-n", metavar="N", help="Sprites to make or to draw.")] = 2048,
    device: Device = None,
    seed: Seed = NEVER_SEEN,
    as_json: Json = False,
) -> None:
    """Measure a trained network on sprites that it never saw.

    For a classifier: accuracy and confusions. For a drawer: a separately trained classifier judges what it draws.

    [bold]Examples[/bold]
      hotloop sprites evaluate classifier.safetensors
      hotloop sprites evaluate classifier.safetensors art.safetensors
      hotloop sprites evaluate drawer.safetensors --judge classifier.safetensors
    """
    from hotloop import pick
    from hotloop.apps.sprites.network_files import TrainedNetwork

    if number < 1:
        raise BadArgument(f"count={number}", fix="give a whole number of at least 1")
    where = pick(device).device
    trained = TrainedNetwork.load(model, device=where)
    if trained.kind == "classifier":
        told = _classifier(trained, data, number, seed, where)
    elif judge is None:
        raise BadArgument(
            f"{model} is a drawer, which needs a classifier as its judge", fix="give --judge classifier.safetensors"
        )
    else:
        told = _drawer(trained, TrainedNetwork.load(judge, "classifier", device=where), data, number, seed, where)
    if as_json:
        print_json({"model": str(model), "device": str(where), **told})
    else:
        _show_worth(told)


def _classifier(
    trained: "TrainedNetwork", data: Path | None, number: int, seed: int, where: "torch.device"
) -> dict[str, Any]:
    from hotloop.apps.sprites.making import CLASSES, load_or_make
    from hotloop.apps.sprites.quality import confusions

    known = [name for name in trained.classes if name in CLASSES]
    if data is None and len(known) < len(trained.classes):
        raise BadArgument(
            "the model was trained on classes that hotloop does not make", fix="give a set of sprites to evaluate it on"
        )
    sprites = load_or_make(data, number, seed, list(trained.classes) if data is None else None)
    trained.must_know(sprites, str(data))
    table = confusions(trained, sprites, where)
    right = table.diagonal().sum().item() / table.sum().item()
    each = (table.diagonal() / table.sum(1).clamp_min(1)).tolist()
    wrong = [
        {"is": trained.classes[i], "taken_for": trained.classes[j], "sprites": int(table[i, j])}
        for i, j in table.nonzero().tolist()
        if i != j
    ]
    return {
        "sprites": len(sprites),
        "accuracy": right,
        "by_class": dict(zip(trained.classes, each, strict=True)),
        "confusions": sorted(wrong, key=lambda row: -int(row["sprites"])),
    }


def _drawer(
    trained: "TrainedNetwork", judge: "TrainedNetwork", data: Path | None, number: int, seed: int, where: "torch.device"
) -> dict[str, Any]:
    import torch

    from hotloop.apps.sprites.dataset import SpriteSet
    from hotloop.apps.sprites.quality import drawn_by
    from hotloop.apps.sprites.quality import judge as judged

    if trained.classes != judge.classes:
        raise BadArgument("the judge knows other classes than the drawer", fix="train both on the same set")
    labels = torch.arange(number) % len(trained.classes)
    with counting("drawing") as progress:
        drawn = drawn_by(trained, labels, where, seed=seed, progress=progress)
    verdict = judged(drawn, judge, None if data is None else SpriteSet.load(data), where)
    return {
        "sprites": verdict.drawn,
        "accuracy": verdict.right,
        "by_class": verdict.right_by_class,
        "copies": verdict.copies,
    }


def _show_worth(facts: dict[str, Any]) -> None:
    words = console()
    say(words, f"{facts['accuracy']:.1%} of {count(facts['sprites'])} sprites are classified correctly", style="bold")
    for name, share in facts["by_class"].items():
        say(words, f"{name:<12} {share:7.1%}", indent="  ")
    for row in facts.get("confusions", [])[:5]:
        say(words, f"{row['sprites']} x {row['is']} taken for {row['taken_for']}", indent="  ", style="dim")
    if facts.get("copies") is not None:
        say(words, f"{facts['copies']:.2%} are exact copies of training sprites")


@app.command(cls=Verb)
def generate(
    classes: Classes = None,
    number: Annotated[int, typer.Option("--count", "-n", metavar="N", help="Sprites of each class.")] = 64,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The contact sheet, a PNG.")] = Path(
        "sheet.png"
    ),
    model: Annotated[
        Path, typer.Option("--model", "-m", metavar="FILE", help="A drawer from `hotloop sprites draw`.")
    ] = Path("drawer.safetensors"),
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the sprites as a set (safetensors).")
    ] = None,
    scale: Scale = 4,
    steps: Annotated[int, typer.Option(metavar="N", help="Drawing steps; more give finer details.")] = 16,
    temperature: Annotated[float, typer.Option(metavar="X", help="Lower is cleaner, higher is more varied.")] = 0.7,
    device: Device = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Draw new sprites with a trained network, as a contact sheet.

    [bold]Examples[/bold]
      hotloop sprites generate --class potion --count 64 --out sheet.png
      hotloop sprites generate -c sword -c ship -n 16   [dim]a row of each[/dim]
      hotloop sprites generate --data new.safetensors   [dim]also as data[/dim]
    """
    import time

    import torch

    from hotloop import pick
    from hotloop.apps.sprites.dataset import label_of
    from hotloop.apps.sprites.network_files import TrainedNetwork
    from hotloop.apps.sprites.pictures import must_fit_a_sheet, save_png, sheet_of
    from hotloop.apps.sprites.quality import drawn_by

    if min(number, scale) < 1:
        raise BadArgument(f"count={number}, scale={scale}", fix="give whole numbers of at least 1")
    must_be_writable(out, data, model, suffix=".png")
    if data is not None:
        must_be_writable(data, model, option="--data", suffix=".safetensors")
    where = pick(device).device
    trained = TrainedNetwork.load(model, "drawer", device=where)
    labels = torch.tensor([label_of(name, trained.classes) for name in classes or trained.classes])
    must_fit_a_sheet(number * len(labels), scale)
    start = time.perf_counter()
    with counting("drawing") as progress:
        each = labels.repeat_interleave(number)
        drawn = drawn_by(trained, each, where, seed=seed, steps=steps, temperature=temperature, progress=progress)
    seconds = time.perf_counter() - start
    save_png(out, sheet_of(drawn, min(16, number), scale))
    if data is not None:
        drawn.save(data)
    if as_json:
        print_json({"out": str(out), "sprites": len(drawn), "seconds": seconds, "device": str(where)})
    else:
        say(console(), f"{plural(len(drawn), 'sprite')} in {duration(seconds)} on {where}: {out}")
