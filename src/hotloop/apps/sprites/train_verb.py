"""`hotloop train`: teach a network to sort sprites or to draw them."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hotloop.apps.sprites.sprites_verb import load_or_make
from hotloop.cli.help import Verb, Verbs
from hotloop.cli.options import INTERRUPTED, Classes, Data, Device, Json, Report, Seed
from hotloop.cli.output import command_line, console, keep, must_be_writable, print_json, say
from hotloop.errors import BadArgument
from hotloop.printing.text import plural, printable

if TYPE_CHECKING:
    from hotloop.apps.sprites.dataset import SpriteSet
    from hotloop.apps.sprites.network_files import TrainedNetwork
    from hotloop.apps.sprites.recipes import FitOptions, Recipe
    from hotloop.records import Report as Training

app = typer.Typer(
    cls=Verbs,
    help="Train a network that classifies sprites, or one that draws new ones.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Out = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write the network.")]
Epochs = Annotated[
    int | None, typer.Option(metavar="N", help="Epochs of training.", show_default="what suits the device")
]
Width = Annotated[
    int | None, typer.Option(metavar="N", help="Width of the network.", show_default="what suits the device")
]
Batch = Annotated[int | None, typer.Option(metavar="N", help="Batch size.", show_default="what suits the device")]
Save = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write checkpoints here, so that the run can resume.", show_default=False),
]
Every = Annotated[str, typer.Option(metavar="TIME", help="Checkpoint interval: 30s, 5min, 1000 steps.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint, or begin if there is none.")]
Gpus = Annotated[
    str,
    typer.Option(metavar="N|auto", help="GPUs of this machine; more than 1 use `hotloop launch`."),
]
TimeLimit = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Save and end after this long, such as 2h.", show_default=False),
]


@app.command(cls=Verb)
def classify(
    data: Data = None,
    out: Out = Path("classifier.safetensors"),
    device: Device = None,
    epochs: Epochs = None,
    width: Width = None,
    batch: Batch = None,
    classes: Classes = None,
    seed: Seed = 0,
    save: Save = None,
    every: Every = "5min",
    resume: Resume = False,
    time_limit: TimeLimit = None,
    gpus: Gpus = "1",
    report: Report = True,
    as_json: Json = False,
) -> None:
    """Train a classifier of sprites and evaluate it on sprites that it never saw.

    Of your own sprites, every tenth is held out for evaluation.

    [bold]Examples[/bold]
      hotloop train classify                      [dim]on sprites made for it[/dim]
      hotloop train classify art.safetensors      [dim]on your own[/dim]
      hotloop evaluate classifier.safetensors     [dim]afterwards: how good is it?[/dim]
      hotloop train classify --save runs/a --resume   [dim]again, until it is done[/dim]
      hotloop train classify --gpus auto          [dim]on all GPUs of this machine[/dim]
    """
    from hotloop.apps.sprites.recipes import learn_to_sort

    run = _run(save, every, resume, time_limit)
    if classes is not None and len(set(classes)) == 1:
        raise BadArgument(
            f"--class {printable(classes[0])} alone, and a classifier has nothing to tell it apart from",
            fix="give --class once more for each other class, or leave it out for all",
        )
    if _on_several(gpus, device, data, out):
        return
    recipe, sprites, held_out = _prepare("classify", data, out, device, (epochs, width, batch), classes, seed, as_json)
    trained, training = learn_to_sort(sprites, held_out, recipe, device=device, **run)
    _finish(trained, training, out, save, report, as_json, f"hotloop evaluate {shlex.quote(str(out))}")


@app.command(cls=Verb)
def draw(
    data: Data = None,
    out: Out = Path("drawer.safetensors"),
    device: Device = None,
    epochs: Epochs = None,
    width: Width = None,
    batch: Batch = None,
    classes: Classes = None,
    seed: Seed = 0,
    save: Save = None,
    every: Every = "5min",
    resume: Resume = False,
    time_limit: TimeLimit = None,
    gpus: Gpus = "1",
    report: Report = True,
    as_json: Json = False,
) -> None:
    """Train a network that draws new sprites of a class, in palette colours, so they are always crisp.

    [bold]Examples[/bold]
      hotloop train draw                          [dim]on sprites made for it[/dim]
      hotloop train draw art.safetensors --epochs 200
      hotloop generate --class potion             [dim]afterwards: new potions[/dim]
      hotloop train draw --save runs/b --resume   [dim]again, until it is done[/dim]
    """
    from hotloop.apps.sprites.recipes import learn_to_draw

    run = _run(save, every, resume, time_limit)
    if _on_several(gpus, device, data, out):
        return
    recipe, sprites, _ = _prepare("draw", data, out, device, (epochs, width, batch), classes, seed, as_json)
    trained, training = learn_to_draw(sprites, recipe, device=device, **run)
    _finish(trained, training, out, save, report, as_json, f"hotloop generate --model {shlex.quote(str(out))}")


def _run(save: Path | None, every: str, resume: bool, time_limit: str | None) -> "FitOptions":
    """How it is saved; what cannot be meant is told before sprites are made."""
    from hotloop.apps.sprites.recipes import FitOptions
    from hotloop.errors import BadArgument
    from hotloop.training.saving import interval_in, seconds_in

    if resume and save is None:
        raise BadArgument("--resume without --save", fix="say where the checkpoints are: --save runs/a --resume")
    interval_in(every)
    if time_limit is not None:
        seconds_in(time_limit)
    return FitOptions(save=save, every=every, resume=resume, time_limit=time_limit)


def _on_several(gpus: str, device: str | None, data: Path | None, out: Path) -> bool:
    """Train in one process for each GPU, where more than one is asked for: this command once more, as a rank."""
    if gpus == "1" or _rank() is not None:
        return False
    from hotloop.cli.launch import number_of_gpus
    from hotloop.errors import BadArgument
    from hotloop.launch.torchrun import LaunchRequest, line_for, run

    if device is not None:
        raise BadArgument(
            f"--gpus {gpus} and --device {device}", fix="give one of them: each process takes its own GPU"
        )
    must_be_writable(out, data, suffix=".safetensors")
    line = line_for(LaunchRequest("hotloop", tuple(sys.argv[1:]), module=True, gpus=number_of_gpus(gpus)))
    if line.processes == 1:
        return False
    typer.echo(f"hotloop train: {line}", err=True)
    run(line, lambda told: typer.echo(f"hotloop train: {told}", err=True))
    return True


def _rank() -> int | None:
    """The number of this process among those of a launched run; None where there is no such run."""
    return int(os.environ["RANK"]) if os.environ.get("RANK", "").isdecimal() and "WORLD_SIZE" in os.environ else None


def _prepare(
    task: Literal["classify", "draw"],
    data: Path | None,
    out: Path,
    device: str | None,
    settings: tuple[int | None, int | None, int | None],
    classes: list[str] | None,
    seed: int,
    as_json: bool,
) -> "tuple[Recipe, SpriteSet, SpriteSet]":
    """The recipe, the sprites to learn from and those held out; what cannot work is told before the work begins."""
    from dataclasses import replace

    from hotloop import pick
    from hotloop.apps.sprites.making import make
    from hotloop.apps.sprites.recipes import must_fit_memory, recipe_for, sprites_for

    must_be_writable(out, data, suffix=".safetensors")
    choice = pick(device)
    chosen = dict(zip(("epochs", "width", "batch"), settings, strict=True))
    given = {name: value for name, value in chosen.items() if value is not None}
    recipe = replace(recipe_for(task, choice.device), seed=seed, **given)
    must_fit_memory(task, recipe, choice.device)
    sprites = load_or_make(data, sprites_for(choice.device), seed, classes)
    if data is None:
        held_out = make(4096, seed=seed + 1_000_003, classes=classes)
    else:
        sprites, held_out = split(sprites)
    if _rank():  # rank 0 speaks for all
        return recipe, sprites, held_out
    words = console(stderr=as_json)
    say(words, f"{choice.device} in {choice.precision}: {choice.reason}")
    of = plural(len(sprites.classes), "class", "classes")
    say(words, f"{plural(len(sprites), 'sprite')} of {of} to learn from, {plural(recipe.epochs, 'epoch')}")
    return recipe, sprites, held_out


def split(sprites: "SpriteSet") -> "tuple[SpriteSet, SpriteSet]":
    """Every tenth sprite held out."""
    import torch

    tenth = torch.arange(len(sprites)) % 10 == 9
    return sprites[~tenth], sprites[tenth] if bool(tenth.any()) else sprites


def _finish(
    trained: "TrainedNetwork",
    training: "Training",
    out: Path,
    save: Path | None,
    report: bool,
    as_json: bool,
    then: str,
) -> None:
    from hotloop.report.runs import PAGE
    from hotloop.report.summary import summary

    if _rank():  # rank 0 writes; an exit code here would end it in the middle of that
        return
    trained.save(out)
    kept = None
    if report:  # beside the checkpoints the run has written its page itself
        kept = save / PAGE if save is not None and (save / PAGE).is_file() else _kept(trained, training)
    if as_json:
        about = {"out": str(out), "report": None if kept is None else str(kept), "classes": list(trained.classes)}
        print_json({**about, **training.to_json()})
    else:
        words = console()
        words.print(summary(training, f"hotloop train: {trained.kind}"))
        say(words, f"Written: {out}{'' if kept is None else f' and {kept}'}. Next: `{then}`")
    if training.interrupted:
        raise typer.Exit(INTERRUPTED)


def _kept(trained: "TrainedNetwork", training: "Training") -> Path:
    """The page and the data of the run; the page."""
    from hotloop.report.page import Training, page
    from hotloop.report.runs import PAGE, run_of

    title = f"A {trained.kind} for {plural(len(trained.classes), 'class', 'classes')} of sprites"
    html = page([Training("", training)], title=title, command=command_line())
    return keep(html, run_of(training, title), training.to_json()) / PAGE
