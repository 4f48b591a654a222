"""What `python -m harness --scaling` has measured and modelled, as plain data."""

from dataclasses import dataclass

from hotloop.apps.simulate.scaling.model import RankStep, ScaledStep
from hotloop.apps.simulate.scaling.network import Cluster, CollectiveFit
from hotloop.records import Record

DDP, LOOP = "DDP", "hotloop.Loop"


@dataclass(frozen=True)
class Repeats(Record):
    """Repeats of one figure."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class MeasuredRanks(Record):
    """So many ranks on this machine, each with the batch of one."""

    ranks: int
    way: str  # DDP: PyTorch's own in a plain loop; hotloop.Loop
    step: Repeats  # seconds
    rate: Repeats  # units per second of all ranks
    efficiency: Repeats  # against one rank with as many threads, which took its turns beside them
    unsynced: Repeats | None = None  # seconds of a step under `no_sync`
    communication: Repeats | None = None  # seconds of a step, less those under `no_sync`
    predicted: ScaledStep | None = None  # from the step of one rank and the measured all-reduces
    # Of it, seconds that ranks wait for the slowest one in each step: what steps under `no_sync` would take longer if
    # all waited for the last after each. None on a GPU, whose host does not know when a step ends.
    waiting: Repeats | None = None

    @property
    def share(self) -> float | None:
        """Of a step, in communication that nothing hides."""
        return None if self.communication is None else self.communication.median / self.step.median

    @property
    def sharing(self) -> float | None:
        """By how much a step without communication takes longer than that of one rank: they share the machine."""
        if self.unsynced is None or self.predicted is None:
            return None
        return self.unsynced.median / (self.predicted.seconds - self.predicted.exposed) - 1

    @property
    def error(self) -> float | None:
        """Predicted less measured efficiency."""
        return None if self.predicted is None else self.predicted.efficiency - self.efficiency.median


@dataclass(frozen=True)
class ModelledRanks(Record):
    """Ranks that are not here, on links that are named: modelled."""

    parallel: str
    cluster: Cluster
    steps: tuple[ScaledStep, ...]


@dataclass(frozen=True)
class ScalingBenchmark(Record):
    """Throughput against ranks: measured on this machine, and modelled beyond it."""

    hardware: str
    command: str
    date: str  # ISO 8601, UTC
    commit: str | None
    versions: dict[str, str]
    workload: str
    device: str
    backend: str  # gloo or nccl
    unit: str
    threads: int  # of each rank
    cores: int  # that these processes may use
    repeats: int
    overlap: float  # share of communication that the model lets backward hide
    others: float | None  # share of all cores that other programs used, in the turns or the all-reduces
    step: RankStep  # of one rank, as it was measured
    measured: tuple[MeasuredRanks, ...]
    fits: tuple[CollectiveFit, ...]  # one for each number of ranks
    modelled: tuple[ModelledRanks, ...]
    failures: tuple[str, ...] = ()
    note: str = ""  # how the workload differs from its full size
    quick: bool = False
