"""`hotloop simulate`: run a training script as if a GPU were there, and tell what would happen on it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotloop.cli.help import Verb
from hotloop.cli.options import Json
from hotloop.cli.output import command_line, console, print_json, say
from hotloop.errors import BadArgument
from hotloop.printing.text import printable

if TYPE_CHECKING:
    from hotloop.apps.simulate.cards import Card
    from hotloop.apps.simulate.compare import Row
    from hotloop.apps.simulate.parallel import OnRanks
    from hotloop.apps.simulate.scaling import Cluster
    from hotloop.apps.simulate.simulation_record import Simulation
    from hotloop.apps.simulate.study import Study
    from hotloop.report.run_folder import RunFolder

MACHINE = 16  # GPUs of a simulated machine
MOST_RANKS = 65_536


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
    gpus: Annotated[
        int, typer.Option(metavar="N", min=1, help="GPUs of the machine; with --parallel, ranks of the run.")
    ] = 1,
    parallel: Annotated[
        str | None,
        typer.Option(metavar="HOW", help="Model the run on --gpus ranks: ddp or fsdp.", show_default=False),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="With --parallel: the link of the GPUs, such as nvlink4, pcie4, ethernet100; with that between nodes: "
            "nvlink4,ndr400.",
            show_default="usual for the GPU",
        ),
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
        bool,
        typer.Option(
            "--largest-batch", help="Find the largest batch that fits, from --batch on, and what would save memory."
        ),
    ] = False,
    price: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Dollars per hour by GPU: lines such as h200,3.5 or JSON.", show_default=False
        ),
    ] = None,
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
    replaces each integer that the script gives BATCH, environment:BATCH sets that. With --largest-batch, or if the
    script does not fit, it also simulates bf16, checkpointing and, with a batch that it can set, accumulation.

    With --parallel, hotloop models the run on several GPUs from the simulation of one: memory of each rank, step time
    and efficiency, with DDP or FSDP. Each rank has the batch of the script.

    [bold]Examples[/bold]
      hotloop simulate train.py --epochs 3            [dim]on an H200[/dim]
      hotloop simulate --gpu rtx4090 train.py --batch 96   [dim]would 96 fit?[/dim]
      hotloop simulate --largest-batch --batch 8 --batch-from variable:B train.py
      hotloop simulate --gpu t4,l4,rtx4090,h200 --price prices.csv train.py
      hotloop simulate --vram 8GiB train.py           [dim]does it fit?[/dim]
      hotloop simulate --gpu a100-80 --gpus 2 train.py   [dim]with cuda:0 and cuda:1[/dim]
      hotloop simulate --gpus 8 --parallel fsdp train.py   [dim]memory of a rank[/dim]
      hotloop simulate --gpus 64 --parallel ddp --link pcie4 train.py
      hotloop simulate --out runs/a train.py          [dim]a page with plots[/dim]
      hotloop simulate --json train.py > simulation.json
    """
    import sys

    from hotloop.apps.simulate.compare import row_of
    from hotloop.apps.simulate.running import LONGEST, Simulator, check_script
    from hotloop.apps.simulate.study import Study, batch_to_set

    cards = _cards(gpu, vram)
    clusters = _clusters(cards, gpus, parallel, link)
    if not 0 < time_limit <= LONGEST:
        raise BadArgument(f"--time-limit {time_limit}", fix=f"give seconds, more than 0 and at most {LONGEST:,}")
    asked = largest_batch or batch is not None or batch_from is not None
    setting = batch_to_set(batch, batch_from, cards) if asked else None
    prices = _prices(price, cards)
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
                gpus=1 if clusters else gpus,
                told=partial(say, console(stderr=True), style="dim"),
            )
            told = _studied(study, cards, largest_batch=largest_batch)
            joint = [
                _on_ranks(study, one, card, gpus, str(parallel), cluster)
                for one, card, cluster in zip(told, cards, clusters, strict=False)
            ]
            for run, one in zip(runs, told, strict=False):
                _write(run, one, Path(file).name)
    except KeyboardInterrupt:
        print("hotloop: stopped", file=sys.stderr)
        raise typer.Exit(130) from None
    rows = [row_of(one, prices) for one in told]
    if as_json:
        ranks = {"ranks": [None if each is None else each.to_json() for each in joint]} if clusters else {}
        print_json({**_data(told, rows, priced=price is not None), **ranks})
    elif len(told) == 1:
        _tell(told[0], cards[0], Path(file), rows[0])
    else:
        _tell_all(told, cards, rows)
    if not as_json:
        _tell_ranks(joint, cards)
    for run in runs:
        say(console(stderr=True), f"the page is {run.path / 'report.html'}", style="dim")
    if any(finding.level == "error" for one in told for finding in one.findings):
        raise typer.Exit(1)


@contextmanager
def _folders(out: Path | None, cards: "Sequence[Card]") -> "Iterator[list[RunFolder]]":
    """A folder for the page of each card, where one is asked for; none of them appears after an error."""
    from hotloop.report.run_folder import new_run

    paths = [] if out is None else [out] if len(cards) == 1 else [out / card.key for card in cards]
    with ExitStack() as stack:
        yield [stack.enter_context(new_run(path)) for path in paths]


def _write(run: "RunFolder", simulation: "Simulation", script: str) -> None:
    import platform
    from datetime import UTC, datetime
    from importlib.metadata import version

    from hotloop.apps.simulate.simulation_page import simulation_page, simulation_run
    from hotloop.report.runs import DATA, PAGE

    data, date = simulation.to_json(), datetime.now(UTC).isoformat(timespec="seconds")
    command = command_line()
    versions = {"python": platform.python_version(), "torch": version("torch")}
    run.write(PAGE, simulation_page(data, script=script, command=command, versions=versions, date=date))
    entry = simulation_run(data, script=script, date=date)
    run.write_json(DATA, entry.with_data({"command": command, "simulation": data}))


def _studied(study: "Study", cards: "Sequence[Card]", *, largest_batch: bool) -> "list[Simulation]":
    """What is asked, of each card; what the script prints is shown once."""
    told: list[Simulation] = []
    for number, card in enumerate(cards):
        found = study.plain(card, silent=number > 0)
        if largest_batch and found.trained:
            found = study.with_largest(found, card)
        if len(cards) == 1 and (found.search is not None or found.fits is False):
            found = study.with_help(found, card)
        told.append(found)
    return told


def _clusters(cards: "Sequence[Card]", gpus: int, parallel: str | None, link: str | None) -> "list[Cluster]":
    """What joins the GPUs, for each card; nothing where no run on several is asked for."""
    from hotloop.apps.simulate.scaling import PARALLEL, cluster, usual_link

    if parallel is None:
        if link is not None:
            raise BadArgument("--link without --parallel", fix="add --parallel ddp or --parallel fsdp")
        if gpus > MACHINE:
            raise BadArgument(
                f"--gpus {gpus:,}: a machine has at most {MACHINE}", fix="for a run on more of them add --parallel ddp"
            )
        return []
    if parallel not in PARALLEL:
        raise BadArgument(f"--parallel {printable(parallel)}", fix=f"choose one of: {', '.join(PARALLEL)}")
    if gpus > MOST_RANKS:
        raise BadArgument(f"--gpus {gpus:,}", fix=f"give at most {MOST_RANKS:,}")
    return [cluster(link or usual_link(card.key, card.pcie)) for card in cards]


def _on_ranks(
    study: "Study", found: "Simulation", card: "Card", gpus: int, parallel: str, cluster: "Cluster"
) -> "OnRanks | None":
    """The run on several GPUs; where one has too little memory, from the simulation of one that has enough."""
    from hotloop.apps.simulate.parallel import on_ranks
    from hotloop.apps.simulate.simulation_record import SHORT

    return on_ranks(study.with_room(card) if found.status == SHORT else found, card, gpus, parallel, cluster)


def _prices(file: Path | None, cards: "Sequence[Card]") -> dict[str, float]:
    from hotloop.apps.simulate.compare import price_of, read_prices

    prices = {} if file is None else read_prices(file)
    if prices and all(price_of(card.key, prices) is None for card in cards):
        names = ", ".join(card.key for card in cards)
        raise BadArgument(
            f"{printable(str(file))} has no price for {names}", fix=f"add a line such as {cards[0].key},1.5"
        )
    return prices


def _cards(gpu: str, vram: str | None) -> "list[Card]":
    from hotloop.apps.simulate.cards import card, generic

    if vram is not None:
        return [generic(vram)]
    names = [name.strip() for name in gpu.split(",") if name.strip()]
    if not names:
        raise BadArgument("--gpu is empty", fix="name a GPU, or several with commas between them")
    return [card(name) for name in dict.fromkeys(names)]


def _data(told: "Sequence[Simulation]", rows: "Sequence[Row]", *, priced: bool) -> dict[str, Any]:
    from hotloop.apps.simulate.compare import ranking

    data = told[0].to_json() if len(told) == 1 else {"simulations": [each.to_json() for each in told]}
    if len(told) == 1 and not priced:
        return data
    ranks = {"ranking": ranking(rows)} if len(told) > 1 else {}
    return {**data, "cards": [row.to_json() for row in rows], **ranks}


def _tell(simulation: "Simulation", card: "Card", script: Path, row: "Row") -> None:
    from hotloop.apps.simulate.shown import simulation_words

    where = console()
    for part in simulation_words(simulation, card.name, script.name, row):
        where.print(part)


def _tell_ranks(joint: "Sequence[OnRanks | None]", cards: "Sequence[Card]") -> None:
    from hotloop.apps.simulate.parallel import ranks_words

    where = console()
    for found, card in zip(joint, cards, strict=False):
        if found is None:
            say(where, f"{card.name}: no prediction for several GPUs, since the script did not train on one.")
            continue
        for number, part in enumerate(ranks_words(found)):
            if number == 1 and len(cards) > 1:
                say(where, card.name, style="bold")
            where.print(part)


def _tell_all(told: "Sequence[Simulation]", cards: "Sequence[Card]", rows: "Sequence[Row]") -> None:
    from hotloop.apps.simulate.shown import MARK, cards_table, ranked

    where = console()
    where.print(cards_table(told, [card.name for card in cards], rows))
    if any(row.step_ms is not None and not row.step_ms.calibrated for row in rows):
        say(where, f"{MARK} uncalibrated: this GPU was not measured, so its time is a rough estimate.", style="dim")
    if order := ranked(rows, {card.key: card.name for card in cards}):
        say(where, order)
    for note in dict.fromkeys(note for one in told for note in one.notes if "batch" in note or "for every GPU" in note):
        say(where, f"note: {note}", style="dim")
    for finding in dict.fromkeys(found for one in told for found in one.findings if found.code == one.status):
        say(where, f"{finding.file}: {finding.message}", style="bold red")
    say(where, "For findings, copies and waits, run the same command with one GPU.")
