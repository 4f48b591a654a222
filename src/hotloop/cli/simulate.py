"""`hotloop simulate`: run a training script as if a GPU were there, and tell what would happen on it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotloop.cli.options import Json
from hotloop.cli.output import console, print_json, say
from hotloop.errors import BadArgument

if TYPE_CHECKING:
    from hotloop.simulate.cards import Card
    from hotloop.simulate.record import Simulation

LISTENERS = ("hotloop.simulate.memory:Memory", "hotloop.simulate.timeline:Time")


def simulate(
    script: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT.py [ARGUMENTS]...", help="What you would write after `python`."),
    ],
    gpu: Annotated[
        str, typer.Option(metavar="NAMES", help="The GPU, such as t4, rtx4090, a100-80, h200; several with commas.")
    ] = "h200",
    vram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Or any GPU with this much memory: 24GiB.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="End after so many steps of the optimizer.")] = 3,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="And after this long.")] = 120,
    as_json: Json = False,
) -> None:
    """Run a training script on a GPU that is not here: device bugs, copies, waits, memory, time.

    The script needs no change and no GPU. Its CUDA tensors have shapes but no values, so that it runs in seconds; all
    device bugs are found in one run, because each is repaired and the script goes on. Options of `hotloop simulate`
    stand before the script's name, the script's own after it.

    [bold]Examples[/bold]
      hotloop simulate train.py --epochs 3            [dim]on an H200[/dim]
      hotloop simulate --gpu rtx4090 train.py
      hotloop simulate --gpu t4,l4,rtx4090,h200 train.py   [dim]a line for each[/dim]
      hotloop simulate --vram 8GiB train.py           [dim]does it fit?[/dim]
      hotloop simulate --json train.py > simulation.json
    """
    import sys

    from hotloop.simulate.running import Simulator

    cards = _cards(gpu, vram)
    if time_limit <= 0:
        raise BadArgument(f"--time-limit {time_limit}", fix="give seconds, more than 0")
    file, *arguments = script
    with Simulator(stdout=sys.stderr if as_json else None) as simulator:
        told = [
            simulator.run(file, arguments, card, steps=steps, time_limit=time_limit, listeners=LISTENERS)
            for card in cards
        ]
    if as_json:
        print_json(_data(told))
    elif len(told) == 1:
        _tell(told[0], cards[0], Path(file))
    else:
        _tell_all(told, cards)
    if any(finding.level == "error" for one in told for finding in one.findings):
        raise typer.Exit(1)


def _cards(gpu: str, vram: str | None) -> "list[Card]":
    from hotloop.simulate.cards import card, generic

    if vram is not None:
        return [generic(vram)]
    names = [name.strip() for name in gpu.split(",") if name.strip()]
    if not names:
        raise BadArgument("--gpu is empty", fix="name a GPU, or several with commas between them")
    return [card(name) for name in dict.fromkeys(names)]


def _data(told: "Sequence[Simulation]") -> dict[str, Any]:
    from hotloop.files import finite

    one: dict[str, Any] = finite(told[0].to_json())
    return one if len(told) == 1 else {"simulations": [finite(each.to_json()) for each in told]}


def _tell(simulation: "Simulation", card: "Card", script: Path) -> None:
    from hotloop.simulate.shown import simulation_words

    where = console()
    for part in simulation_words(simulation, card.name, script.name):
        where.print(part)


def _tell_all(told: "Sequence[Simulation]", cards: "Sequence[Card]") -> None:
    from hotloop.simulate.shown import cards_table

    where = console()
    where.print(cards_table(told, [card.name for card in cards]))
    say(where, "Findings, copies and waits: the same command with one GPU.")
