"""What several GPUs would give, modelled from the simulation of one: memory of a rank, time of a step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.scaling import Cluster, RankMemory, ScaledStep, rank_memory, scaled
from hotloop.apps.simulate.simulation_record import SHORT, Simulation
from hotloop.printing.text import count, duration, size
from hotloop.records import Record

SHARDED = ("parameters", "gradients", "optimizer")
CONTEXT = "context"
ROOM = 0.96  # share of the memory that the process may take: the allocator cannot use every piece
MODELLED = "modelled"


@dataclass(frozen=True)
class OnRanks(Record):
    """A training on several GPUs, each with the batch of the one that was simulated."""

    parallel: str
    gpus: int
    cluster: Cluster
    memory: RankMemory  # of a rank when it holds most
    process: int  # bytes that the driver would show of a rank, at the peak
    alone: int  # the same of one GPU
    low: int
    high: int
    fits: bool | None  # None: too close to say
    step: ScaledStep | None  # None where the time of a step is not known
    alone_seconds: float | None
    basis: str = MODELLED


def on_ranks(simulation: Simulation, card: Card, gpus: int, parallel: str, cluster: Cluster) -> OnRanks | None:
    """What so many GPUs would do; None where one was not simulated long enough, or ran out of memory itself."""
    peak = simulation.peak
    if not simulation.trained or simulation.status == SHORT or peak is None:
        return None
    rank = simulation.rank
    root, blocks = (simulation.categories.get("parameters", 0), []) if rank is None else rank.blocks()
    fullest = max(
        (
            rank_memory(
                parallel,
                gpus,
                parameters=moment.get("parameters", 0),
                gradients=moment.get("gradients", 0),
                optimizer=moment.get("optimizer", 0),
                other=sum(amount for name, amount in moment.items() if name not in (*SHARDED, CONTEXT)),
                trained=None if rank is None else rank.gradient_bytes,
                root=root,
                largest=max((amount for amount, _ in blocks), default=0),
            )
            for moment in _moments(simulation)
        ),
        key=lambda memory: memory.total,
    )
    # The allocator caches in proportion to what it hands out.
    context = simulation.categories.get(CONTEXT, 0)
    process = int(context + fullest.total * peak.reserved / max(peak.allocated, 1))
    interval = simulation.interval
    low, high = (
        (process, process)
        if interval is None
        else (int(process * each.process / max(peak.process, 1)) for each in (interval.low, interval.high))
    )
    step = None
    if rank is not None:
        samples = simulation.batch.samples if simulation.batch is not None else None
        step = scaled(replace(rank, units=samples or 0), cluster, gpus, parallel)
    return OnRanks(
        parallel=parallel,
        gpus=gpus,
        cluster=cluster,
        memory=fullest,
        process=process,
        alone=peak.process,
        low=low,
        high=high,
        fits=True if high <= ROOM * card.memory else False if low > card.memory else None,
        step=step,
        alone_seconds=None if rank is None else rank.seconds,
    )


def ranks_words(found: OnRanks) -> Iterator[RenderableType]:
    """The same for a person."""
    cluster = found.cluster
    links = cluster.inside.name
    if cluster.between is not None and found.gpus > cluster.node:
        links = (
            cluster.between.name if cluster.node == 1 else f"{links} in nodes of {cluster.node}, {cluster.between.name}"
        )
    yield Text()
    yield Text(f"{found.gpus:,} GPUs with {found.parallel.upper()} over {links}: modelled, not measured", style="bold")
    verdict = {True: "it fits", False: "it does not fit", None: "too close to say whether it fits"}[found.fits]
    between = "" if found.low == found.high else f" ({size(found.low)} to {size(found.high)})"
    yield Text(
        f"{verdict}: each rank would take {size(found.process)}{between}; one GPU alone takes {size(found.alone)}"
    )
    table = Table(box=None, padding=(0, 2, 0, 2), pad_edge=False, show_header=False)
    table.add_column("what")
    table.add_column("bytes", justify="right")
    memory = found.memory
    whole = "blocks that are gathered" if found.parallel == "fsdp" else "buckets of gradients"
    rows = {"parameters": memory.parameters, "gradients": memory.gradients, "optimizer": memory.optimizer}
    rows |= {whole: memory.whole, "gradients before they are scattered": memory.unsharded}
    for name, amount in {**rows, "activations and all else": memory.other}.items():
        if amount:
            table.add_row(Text(name), size(amount))
    yield table
    step = found.step
    if step is not None and found.alone_seconds is not None:
        takes, alone = duration(step.seconds), duration(found.alone_seconds)
        bare, hidden = duration(step.exposed), duration(step.communication - step.exposed)
        yield Text(f"a step takes {takes} instead of {alone}: efficiency {step.efficiency:.1%}")
        yield Text(f"  communication: {bare} of the step, and {hidden} hidden behind computation")
        if step.throughput:
            yield Text(f"{count(step.throughput)} samples a second from all of them, where the data keeps up")


def _moments(simulation: Simulation) -> Iterator[dict[str, int]]:
    """Bytes by category, at each point of the timeline that was kept and at the peak."""
    yield simulation.categories
    for number in range(min((len(band.bytes) for band in simulation.bands), default=0)):
        yield {band.category: band.bytes[number] for band in simulation.bands}
