"""A step on n GPUs from the step of one: the communication of DDP and FSDP, and how much of it backward hides."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hotloop.apps.simulate.scaling.network import Cluster
from hotloop.errors import BadArgument
from hotloop.records import Record

PARALLEL = ("ddp", "fsdp")
MIB = 2**20
FIRST_BUCKET, BUCKET = MIB, 25 * MIB  # bytes, as DDP has them


@dataclass(frozen=True)
class GradientReady(Record):
    """A gradient, in the order in which backward makes them."""

    bytes: int
    ready: float  # share of the backward pass that is over when it is there, 0 to 1
    block: str = ""  # the repeated block of the model that its parameter is in; none: the rest, FSDP's root


@dataclass(frozen=True)
class RankStep(Record):
    """The step of one rank alone, in seconds."""

    forward: float
    backward: float
    update: float
    gradients: tuple[GradientReady, ...]
    units: float = 1.0  # samples, tokens, … that a rank trains on in a step
    copies: float = 0.0  # that DDP adds: all gradients into buckets and back

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.update

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient.bytes for gradient in self.gradients)

    def blocks(self) -> "tuple[int, list[tuple[int, float]]]":
        """Bytes of FSDP's root; and of each block, in the order of backward, with the share of backward it takes."""
        ends: dict[str, float] = {}
        sizes: dict[str, int] = {}
        for gradient in self.gradients:
            sizes[gradient.block] = sizes.get(gradient.block, 0) + gradient.bytes
            ends[gradient.block] = max(ends.get(gradient.block, 0.0), gradient.ready)
        root = sizes.pop("", 0)
        found, last = [], 0.0
        for name in sorted(sizes, key=ends.__getitem__):
            found.append((sizes[name], ends[name] - last))
            last = ends[name]
        return root, found


@dataclass(frozen=True)
class ScaledStep(Record):
    """A step on several GPUs: modelled, not measured. Seconds."""

    parallel: str  # ddp or fsdp
    gpus: int
    seconds: float
    communication: float  # of all collectives, one after another
    exposed: float  # of it, what nothing hides; and DDP's copies
    throughput: float  # units per second of all GPUs
    efficiency: float  # of the throughput of one GPU times their number, 0 to 1


def scaled(step: RankStep, cluster: Cluster, gpus: int, parallel: str = "ddp", *, overlap: float = 1.0) -> ScaledStep:
    """A step on so many GPUs, each with the batch of one (weak scaling).

    `overlap` is the share of communication that needs nothing of what computes: 1 for NCCL on GPUs, 0 for gloo on a CPU
    whose cores all compute.
    """
    if gpus < 1:
        raise BadArgument(f"{gpus} GPUs", fix="give a number of at least 1")
    if parallel not in PARALLEL:
        raise BadArgument(f"no way to train in parallel is known as {parallel!r}", fix="choose ddp or fsdp")
    communication, end = (_ddp if parallel == "ddp" else _fsdp)(step, cluster, gpus)
    alone = step.seconds
    exposed = min(max(end - step.forward - step.backward, 0.0), communication)
    exposed += (1 - overlap) * (communication - exposed)
    exposed += step.copies if parallel == "ddp" and gpus > 1 else 0.0
    seconds = alone + exposed
    efficiency = alone / seconds if seconds else 1.0
    return ScaledStep(
        parallel, gpus, seconds, communication, exposed, gpus * step.units / seconds if seconds else 0.0, efficiency
    )


def buckets(
    gradients: Sequence[GradientReady], *, first: int = FIRST_BUCKET, most: int = BUCKET
) -> Iterator[tuple[int, float]]:
    """DDP's buckets: their bytes, and the share of backward after which each is complete.

    A bucket takes gradients, in the order in which they come, until it holds at least its size.
    """
    held, ready, limit = 0, 0.0, first
    for gradient in gradients:
        held += gradient.bytes
        ready = max(ready, gradient.ready)
        if held >= limit:
            yield held, ready
            held, limit = 0, most
    if held:
        yield held, ready


def _ddp(step: RankStep, cluster: Cluster, gpus: int) -> tuple[float, float]:
    """Seconds of all-reduces; and the end of the last one, or of backward.

    Buckets are reduced one after another, each once it is complete.
    """
    total = link = 0.0
    for size, ready in buckets(step.gradients):
        taken = cluster.all_reduce(gpus, size)
        total += taken
        link = max(link, step.forward + ready * step.backward) + taken
    return total, max(link, step.forward + step.backward)


def _fsdp(step: RankStep, cluster: Cluster, gpus: int) -> tuple[float, float]:
    """Seconds of collectives; and the end of the last one, or of backward.

    The root is gathered before everything and kept. Each block is gathered for forward and again for backward, while
    the block before it computes; its gradients are scattered once they are there. One collective at a time.
    """
    root, blocks = step.blocks()

    def takes(size: int) -> float:
        return cluster.all_gather(gpus, size)

    total = 2 * takes(root) + 3 * sum(takes(size) for size, _ in blocks)
    link = now = takes(root)
    left, asked = step.forward, 0.0
    rest = 1.0 - sum(share for _, share in blocks)  # of the root's own work: the embedding and what comes before
    now += rest * left
    for size, share in reversed(blocks):
        link = max(link, asked) + takes(size)
        asked = max(now, link)
        now = asked + share * left
    pending, asked = 0, now
    for size, share in blocks:
        link = gathered = max(link, asked) + takes(size)
        if pending:
            link = max(link, now) + takes(pending)
        asked = max(now, gathered)
        now = asked + share * step.backward
        pending = size
    if pending:
        link = max(link, now) + takes(pending)
    now += rest * step.backward
    return total, max(max(link, now) + takes(root), now)
