"""`hotloop simulate`: run a training script as if a GPU were there, and tell what would happen on it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import Json
from hotloop.cli.output import command_line, console, print_json, say
from hotloop.errors import INTERRUPTED, BadArgument

if TYPE_CHECKING:
    from hotloop.apps.simulate.cards import Card
    from hotloop.apps.simulate.simulation_record import Simulation
    from hotloop.apps.simulate.study import Study
    from hotloop.report.runs import RunFolder

app = typer.Typer(add_completion=False)


@app.command("simulate", cls=Verb, context_settings={"allow_interspersed_args": False})
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
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="End after this many optimizer steps.")] = 3,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Set the script's batch size, with --batch-from.", show_default="its own"
        ),
    ] = None,
    batch_from: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Where the script takes its batch size: argument:--NAME, variable:NAME or environment:NAME.",
            show_default=False,
        ),
    ] = None,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Find the largest batch that fits, from --batch on.")
    ] = False,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="End after this long.")] = 120,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write report.html, with memory over time, and report.json here.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate a training script on a GPU that you do not have: device bugs, copies, synchronization, memory, time.

    The script needs no change and no GPU. Its CUDA tensors have shapes but no values, so it runs in seconds. One run
    finds all device bugs: hotloop repairs each one and the script continues. Options of `hotloop simulate` stand before
    the script's name, the script's own after it.

    hotloop sets the batch size where you say: argument:--micro adds --micro N to the script's arguments, variable:BATCH
    replaces each integer that the script gives BATCH, environment:BATCH sets that.

    [bold]Examples[/bold]
      hotloop simulate train.py --epochs 3            [dim]on an H200[/dim]
      hotloop simulate --gpu rtx4090 train.py --batch 96   [dim]would 96 fit?[/dim]
      hotloop simulate --largest-batch --batch 8 --batch-from variable:B train.py
      hotloop simulate --gpu t4,l4,rtx4090,h200 train.py   [dim]a line for each[/dim]
      hotloop simulate --vram 8GiB train.py           [dim]does it fit?[/dim]
      hotloop simulate --out runs/a train.py          [dim]a page with a plot[/dim]
      hotloop simulate --json train.py > simulation.json
    """
    import sys

    from hotloop.apps.simulate.running import LONGEST, Simulator, check_script
    from hotloop.apps.simulate.study import Study, batch_to_set

    cards = _cards(gpu, vram)
    if not 0 < time_limit <= LONGEST:
        raise BadArgument(f"--time-limit {time_limit}", fix=f"give seconds, more than 0 and at most {LONGEST:,}")
    asked = largest_batch or batch is not None or batch_from is not None
    setting = batch_to_set(batch, batch_from, cards) if asked else None
    file, *arguments = script
    check_script(Path(file))
    try:
        with _folders(out, cards) as runs, Simulator(stdout=sys.stderr if as_json else None) as simulator:
            study = Study(
                simulator,
                file,
                arguments,
                steps=steps,
                time_limit=time_limit,
                batch=setting,
                told=partial(say, console(stderr=True), style="dim"),
            )
            told = _studied(study, cards, largest_batch=largest_batch)
            for run, one in zip(runs, told, strict=False):
                _write(run, one, Path(file).name)
    except KeyboardInterrupt:
        print("hotloop: stopped", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    _show(told, Path(file).name, as_json=as_json)
    for run in runs:
        say(console(stderr=True), f"the page is {run.path / 'report.html'}", style="dim")
    if any(finding.level == "error" for one in told for finding in one.findings):
        raise typer.Exit(1)


@contextmanager
def _folders(out: Path | None, cards: "Sequence[Card]") -> "Iterator[list[RunFolder]]":
    """A folder for the page of each card, where one is asked for; none of them appears after an error."""
    from hotloop.report.runs import new_run

    paths = [] if out is None else [out] if len(cards) == 1 else [out / card.key for card in cards]
    with ExitStack() as stack:
        yield [stack.enter_context(new_run(path)) for path in paths]


def _write(run: "RunFolder", simulation: "Simulation", script: str) -> None:
    import platform
    from datetime import UTC, datetime
    from importlib.metadata import version

    from hotloop.apps.simulate.shown import simulation_page, simulation_run
    from hotloop.report.runs import DATA, PAGE

    command, date = command_line(), datetime.now(UTC).isoformat(timespec="seconds")
    versions = {"python": platform.python_version(), "torch": version("torch")}
    run.write(PAGE, simulation_page(simulation, script, command=command, versions=versions, date=date))
    entry = simulation_run(simulation, script, date)
    run.write_json(DATA, entry.with_data({"command": command, "simulation": simulation.to_json()}))


def _studied(study: "Study", cards: "Sequence[Card]", *, largest_batch: bool) -> "list[Simulation]":
    """What is asked, of each card; what the script prints is shown once."""
    told: list[Simulation] = []
    for number, card in enumerate(cards):
        found = study.plain(card, silent=number > 0)
        if largest_batch and found.trained:
            found = study.with_largest(found, card)
        told.append(found)
    return told


def _cards(gpu: str, vram: str | None) -> "list[Card]":
    from hotloop.apps.simulate.cards import card, generic

    if vram is not None:
        return [generic(vram)]
    names = [name.strip() for name in gpu.split(",") if name.strip()]
    if not names:
        raise BadArgument("--gpu is empty", fix="name a GPU, or several with commas between them")
    return [card(name) for name in dict.fromkeys(names)]


def _show(told: "Sequence[Simulation]", script: str, *, as_json: bool) -> None:
    from hotloop.apps.simulate.shown import MARK, cards_table, ranked, ranking, simulation_words

    where = console()
    if as_json and len(told) == 1:
        print_json(told[0].to_json())
    elif as_json:
        ranks = [[each.gpu for each in rank] for rank in ranking(told)]
        print_json({"simulations": [each.to_json() for each in told], "ranking": ranks})
    elif len(told) == 1:
        for part in simulation_words(told[0], script):
            where.print(part)
    else:
        where.print(cards_table(told))
        if any(each.step_ms is not None and not each.step_ms.calibrated for each in told):
            say(where, f"{MARK} uncalibrated: this GPU was not measured, so its time is a rough estimate.", style="dim")
        if order := ranked(told):
            say(where, order)
        for finding in dict.fromkeys(found for one in told for found in one.findings if found.code == one.status):
            say(where, f"{finding.file}: {finding.message}", style="bold red")
        say(where, "For findings, copies, waits and notes, run the same command with one GPU.")
