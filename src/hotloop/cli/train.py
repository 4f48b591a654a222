"""`hotloop train`: the training loop that a person's own file builds, trained."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotloop.cli.help import Verb
from hotloop.cli.launch import number_of_gpus
from hotloop.cli.options import Device, Gpus, Json, Report, Resume, Save, Target, TimeLimit
from hotloop.cli.output import console, keep_training, print_json, say
from hotloop.errors import INTERRUPTED, BadArgument

if TYPE_CHECKING:
    from hotloop import Loop
    from hotloop.records import Report as Training


app = typer.Typer(add_completion=False)


@app.command("train", cls=Verb)
def train(
    target: Target,
    epochs: Annotated[
        int | None, typer.Option(metavar="N", help="Epochs of training.", show_default="what build() gives, else 1")
    ] = None,
    save: Save = None,
    resume: Resume = False,
    time_limit: TimeLimit = None,
    best: Annotated[
        str | None,
        typer.Option(metavar="METRIC", help="The metric of the best checkpoint.", show_default="the validation loss"),
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(metavar="WHERE", help="tensorboard, wandb, mlflow or FILE.jsonl; several times."),
    ] = None,
    dry_run: Annotated[
        int | None,
        typer.Option(metavar="N", help="First try N steps of everything, and undo them.", show_default=False),
    ] = None,
    device: Device = None,
    gpus: Gpus = "1",
    report: Report = True,
    as_json: Json = False,
) -> None:
    """Train your own model: on the right device, as fast as it can, and hard to kill.

    Write a function in your train.py that ends in [bold]return hotloop.Loop(model, optimizer, loss), loader[/bold]. A
    third value gives arguments of loop.fit: [bold]return loop, loader, {"validate": val_loader, "epochs": 3}[/bold].
    Options of this command win over them. Ctrl-C saves and ends after the current step; with --save and --resume the
    same command continues there.

    [bold]Examples[/bold]
      hotloop train train.py:build --epochs 3
      hotloop train train.py:build --save runs/a --resume   [dim]until it is done[/dim]
      hotloop train train.py:build --dry-run 3 --save runs/a --time-limit 2h
      hotloop train train.py:build --best accuracy --save runs/a --log tensorboard
      hotloop train train.py:build --gpus auto              [dim]all GPUs here[/dim]
    """
    for option, number in (("--epochs", epochs), ("--dry-run", dry_run)):
        if number is not None and number < 1:
            raise BadArgument(f"{option} {number}", fix="give 1 or more")
    if _ran_on_several(gpus, device):
        return
    from hotloop.cli.building import build, explained
    from hotloop.run.intervals import seconds_in

    if time_limit is not None:
        seconds_in(time_limit)  # a mistake is told before the file runs
    loop, loader, settings = build(target, device)
    options: dict[str, Any] = {"epochs": epochs, "save": save, "resume": resume or None, "time_limit": time_limit}
    options |= {"best": best, "log": log, "dry_run": dry_run}
    settings = settings | {name: value for name, value in options.items() if value is not None}
    folder = settings.get("save")
    if settings.get("resume") and folder is None:
        raise BadArgument("--resume without --save", fix="say where the checkpoints are: --save runs/a --resume")
    words = console(stderr=as_json)
    if not _rank():  # rank 0 speaks for all
        say(words, f"{loop.device}: {loop.choice.reason}")
        if folder is None:
            say(words, "no --save DIR: the weights end with this command", style="yellow")
    with explained(target):
        training = loop.fit(loader, **settings)
    if _rank():  # rank 0 writes; an exit code here would end it in the middle of that
        return
    _show(loop, training, folder, report, as_json)
    if training.interrupted:
        raise typer.Exit(INTERRUPTED)


def _rank() -> int | None:
    """The number of this process among those of a launched run; None where there is no such run."""
    return int(os.environ["RANK"]) if os.environ.get("RANK", "").isdecimal() and "WORLD_SIZE" in os.environ else None


def _ran_on_several(gpus: str, device: str | None) -> bool:
    """Run this command in one process for each GPU, where more than one is asked for; whether it did."""
    if gpus == "1" or _rank() is not None:
        return False
    from hotloop.scripts.torchrun import LaunchRequest, line_for, run

    if device is not None:
        raise BadArgument(
            f"--gpus {gpus} and --device {device}", fix="give one of them: each process takes its own GPU"
        )
    line = line_for(LaunchRequest("hotloop", tuple(sys.argv[1:]), module=True, gpus=number_of_gpus(gpus)))
    if line.processes == 1:
        return False
    typer.echo(f"hotloop train: {line}", err=True)
    run(line, lambda told: typer.echo(f"hotloop train: {told}", err=True))
    return True


def _show(loop: "Loop", training: "Training", folder: str | Path | None, report: bool, as_json: bool) -> None:
    """The numbers, and where the page and the weights are."""
    name = type(loop.model).__name__
    page = keep_training(training, name, folder) if report else None
    if as_json:
        where: dict[str, Any] = {"save": folder, "report": page}
        print_json({**{key: None if path is None else str(path) for key, path in where.items()}, **training.to_json()})
        return
    from hotloop.report.training_page import summary

    words = console()
    words.print(summary(training, f"hotloop train: {name}"))
    if page is not None:
        say(words, f"The page: {page}")
    if folder is not None:
        say(words, f"The weights: `hotloop.load_weights(model, {str(folder)!r})`")
