"""Memory of one rank: what DDP adds to that of one GPU, and what FSDP shards."""

from dataclasses import dataclass

from hotloop.errors import BadArgument
from hotloop.records import Record


@dataclass(frozen=True)
class RankMemory(Record):
    """Bytes of one rank at one moment: modelled, not measured."""

    parallel: str
    gpus: int
    parameters: float
    gradients: float
    optimizer: float
    whole: float  # FSDP: blocks that are gathered; DDP: the buckets into which gradients are copied
    other: float  # activations, inputs, buffers, workspaces: as on one GPU
    unsharded: float = 0.0  # FSDP: gradients that are not scattered yet

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.whole + self.other + self.unsharded


def rank_memory(
    parallel: str,
    gpus: int,
    *,
    parameters: float,
    gradients: float,
    optimizer: float,
    other: float,
    trained: float | None = None,
    root: float = 0.0,
    largest: float = 0.0,
) -> RankMemory:
    """Bytes of a rank from those of one GPU at the same moment.

    `trained` are the gradients of all parameters, for which DDP keeps buckets; by default those that are there.
    `root` and `largest` are the parameters of FSDP's root and of its largest block: the root is whole all the time, and
    a block while the one before it computes, so that two are whole at once. Their gradients are whole too, of the root
    until backward has ended, and of a block until it has computed; those of the block before it are being scattered.

    >>> rank_memory("fsdp", 4, parameters=8e9, gradients=8e9, optimizer=16e9, other=1e9, largest=5e8).total / 1e9
    11.0
    """
    if parallel == "ddp":
        buckets = 0.0 if gpus == 1 else gradients if trained is None else trained
        return RankMemory(parallel, gpus, parameters, gradients, optimizer, buckets, other)
    if parallel != "fsdp":
        raise BadArgument(f"no way to train in parallel is known as {parallel!r}", fix="choose ddp or fsdp")
    whole = min(root + 2 * largest, parameters)
    unsharded = min(root + 2 * largest, gradients)
    return RankMemory(parallel, gpus, parameters / gpus, gradients / gpus, optimizer / gpus, whole, other, unsharded)
