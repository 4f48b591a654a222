"""`hotloop evaluate`: what a trained network is worth, on sprites that it never saw."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotloop.apps.sprites.sprites_verb import load_or_make
from hotloop.cli.help import Verb
from hotloop.cli.options import Data, Device, Json, Seed
from hotloop.cli.output import console, counting, print_json, say
from hotloop.errors import BadArgument
from hotloop.printing.text import count

if TYPE_CHECKING:
    import torch

    from hotloop.apps.sprites.network_files import TrainedNetwork

NEVER_SEEN = 2_000_003  # a seed that no training uses by itself


app = typer.Typer(add_completion=False)


@app.command("evaluate", cls=Verb)
def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A network that `hotloop train` wrote.")],
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
      hotloop evaluate classifier.safetensors
      hotloop evaluate classifier.safetensors art.safetensors
      hotloop evaluate drawer.safetensors --judge classifier.safetensors
    """
    from hotloop import pick
    from hotloop.apps.sprites.network_files import TrainedNetwork, kind_of

    if number < 1:
        raise BadArgument(f"count={number}", fix="give a whole number of at least 1")
    where = pick(device).device
    kind = kind_of(model)
    trained = TrainedNetwork.load(model, kind, where)
    if kind == "classifier":
        told = _classifier(trained, data, number, seed, where)
    elif judge is None:
        raise BadArgument(
            f"{model} is a drawer, which needs a classifier as its judge", fix="give --judge classifier.safetensors"
        )
    else:
        told = _drawer(trained, TrainedNetwork.load(judge, "classifier", where), data, number, seed, where)
    if as_json:
        print_json({"model": str(model), "device": str(where), **told})
    else:
        _show(told)


def _classifier(
    trained: "TrainedNetwork", data: Path | None, number: int, seed: int, where: "torch.device"
) -> dict[str, Any]:
    from hotloop.apps.sprites.making import CLASSES
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

    from hotloop.apps.sprites.making import must_fit_memory
    from hotloop.apps.sprites.quality import drawn_by
    from hotloop.apps.sprites.quality import judge as judged

    if trained.classes != judge.classes:
        raise BadArgument("the judge knows other classes than the drawer", fix="train both on the same set")
    must_fit_memory(number)
    labels = torch.arange(number) % len(trained.classes)
    with counting("drawing") as progress:
        drawn = drawn_by(trained, labels, where, seed=seed, progress=progress)
    learned_from = load_or_make(data, 1, 0, None) if data is not None else None
    verdict = judged(drawn, judge, learned_from, where)
    return {
        "sprites": verdict.drawn,
        "accuracy": verdict.right,
        "by_class": verdict.right_by_class,
        **verdict.to_json(),
    }


def _show(facts: dict[str, Any]) -> None:

    words = console()
    say(words, f"{facts['accuracy']:.1%} of {count(facts['sprites'])} sprites are classified correctly", style="bold")
    for name, share in facts["by_class"].items():
        say(words, f"{name:<12} {share:7.1%}", indent="  ")
    for row in facts.get("confusions", [])[:5]:
        say(words, f"{row['sprites']} x {row['is']} taken for {row['taken_for']}", indent="  ", style="dim")
    if "distinct" in facts:
        say(words, f"{facts['distinct']:.1%} differ from one another")
        if facts["copies"] is not None:
            say(words, f"{facts['copies']:.2%} are exact copies of training sprites")
