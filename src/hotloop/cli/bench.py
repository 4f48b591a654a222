"""`hotloop bench`: a person's own training loop, timed on each device that is here."""

import math
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import Json, Report, Target
from hotloop.cli.output import command_line, console, keep, print_json, say
from hotloop.errors import BadArgument, HotloopError

if TYPE_CHECKING:
    from hotloop.cli.building import Built
    from hotloop.profiling.pace import LoopPace, Way
    from hotloop.report.loops import LoopsTimed

WAYS: "tuple[Way, ...]" = ("tutorial", "fit")

app = typer.Typer(add_completion=False)


@app.command("bench", cls=Verb)
def bench(
    target: Target,
    devices: Annotated[
        list[str] | None,
        typer.Option("--device", "-d", metavar="NAME", help="May be given several times.", show_default="cpu, best"),
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="How long to time, in all.")] = 40.0,
    report: Report = True,
    as_json: Json = False,
) -> None:
    """Time your own training loop: the CPU against the GPU, the loop as tutorials write it against loop.fit.

    The function is that of [bold]hotloop train[/bold]; it is called once for each device and loop. Each is warmed up
    and then timed three times, with the device idle at both ends. The weights are thrown away.

    [bold]Examples[/bold]
      hotloop bench train.py:build                     [dim]within a minute[/dim]
      hotloop bench train.py:build --seconds 300       [dim]as longer runs get it[/dim]
      hotloop bench train.py:build -d cuda:0 -d cuda:1
    """
    if not 0 < seconds < math.inf:
        raise BadArgument(f"--seconds {seconds}", fix="give a number above 0")
    from hotloop.cli.building import file_and_function

    file_and_function(target)  # a mistake is told before the first word on a device
    timed = _timed(target, _names(devices), seconds)
    from hotloop.report.loops import loops_page, loops_run, loops_table, loops_words

    page = keep(loops_page(timed, command_line()), loops_run(timed), timed.to_json()) if report else None
    if as_json:
        print_json({"report": None if page is None else str(page), **timed.to_json()})
        return
    words = console()
    table = loops_table(timed)
    words.print(table.in_terminal(wraps=(len(table.header) - 1,)))
    say(words, loops_words(timed), style="bold")
    if page is not None:
        say(words, f"The page: {page}")


def _names(asked: list[str] | None) -> list[str]:
    """The devices that were asked for; else the CPU, and the best one here."""
    from hotloop import pick

    if asked:
        return list(dict.fromkeys(str(pick(name).device) for name in asked))
    choice = pick()
    say(console(stderr=True), choice.reason)
    return list(dict.fromkeys(["cpu", str(choice.device)]))


def _timed(target: str, devices: list[str], seconds: float) -> "LoopsTimed":
    """Every loop on every device, one after the other; what fails on one of them does not end the others."""
    from dataclasses import replace

    from hotloop.cli.building import build
    from hotloop.memory.oom import clear
    from hotloop.profiling.pace import LoopPace
    from hotloop.report.loops import WAY_NAMES, LoopsTimed
    from hotloop.version import versions

    each = seconds / len(devices) / len(WAYS)
    timed = LoopsTimed("", each, (), {}, datetime.now(UTC).isoformat(timespec="seconds"), versions())
    failure: HotloopError | None = None
    for device in devices:
        for way in WAYS:
            say(console(stderr=True), f"{device}: {WAY_NAMES[way]}")
            built = build(target, device)
            name, chosen = type(built.loop.model).__name__, built.loop.choice
            try:
                pace = _pace(target, built, device, way, each)
            except HotloopError as error:
                failure = error.with_traceback(None)
                failure.__cause__ = failure.__context__ = None  # whose frames hold tensors
                pace = LoopPace(device, way, failure=str(error).partition("\n")[0])
            names = timed.devices | {device: chosen.name or device}
            timed = replace(timed, model=name, devices=names, paces=(*timed.paces, pace))
            del built
            clear(chosen.device)
    if failure is not None and timed.fastest is None:
        raise failure
    return timed


def _pace(target: str, built: "Built", device: str, way: "Way", seconds: float) -> "LoopPace":
    """One loop on one device."""
    import torch

    from hotloop.cli.building import explained
    from hotloop.profiling.pace import FittedLoop, LoopPace, TutorialLoop, timed

    loop, loader, settings = built
    if loop.device.type != torch.device(device).type:
        fix = "leave device= out: hotloop picks it, and HOTLOOP_DEVICE says which"
        raise BadArgument(f"on {device}, build() made a loop on {loop.device}", fix=fix)
    transform = settings.get("device_transform")
    with explained(target):
        if way == "tutorial":
            hand = TutorialLoop(loop.model, loop.objectives, loader, loop.plan, transform)
            return LoopPace(device, way, timed(hand.run, seconds), (loop.plan.precision,))
        fitted = FittedLoop(partial(loop.fit, loader, device_transform=transform, progress=False, monitor=False))
        rates = timed(fitted.run, seconds)
        return LoopPace(device, way, rates, (fitted.last.precision, *fitted.last.levers))
