"""`SeenScript`: what a run of the script showed, as plain data for the rules. No torch here."""

from dataclasses import dataclass

from hotloop.records import Record

# What happens at a line, in the words of `SeenLine.what`.
COLLECTS, EMPTIES, SYNCHRONIZES, KEEPS_ZEROS = "gc.collect()", "empty_cache()", "synchronize()", "set_to_none=False"
READS, COPIES, OPERATIONS = "reads a value", "copies to the GPU", "starts operations"
OFTEN = 0.5  # times in a step that count as every step


@dataclass(frozen=True)
class Location(Record):
    """A line of the person's own code."""

    file: str
    line: int


@dataclass(frozen=True)
class SeenLoader(Record):
    """A DataLoader that the training steps read from."""

    made: Location | None  # where DataLoader(…) is called
    given: tuple[str, ...]  # names of the arguments in that call, also of those in *args and **kwargs
    read: Location | None  # the loop over it
    name: str  # what that loop calls it; empty where it has no name there
    device: str  # what that loop calls the device
    workers: int
    is_persistent: bool
    is_pinned: bool
    is_constant: bool  # its items are tensors in memory
    is_plain: bool  # no loader of a class of its own
    is_iterable: bool  # its dataset has no indices, so each worker would give all of it
    epochs: int = 0  # begun
    start: float = 0.0  # seconds from the beginning of an epoch to its first batch, the mean of later epochs
    wait: float = 0.0  # seconds in a step for which the script waits for it
    enough: int = 0  # workers with which it keeps up, as far as this machine can


@dataclass(frozen=True)
class SeenOptimizer(Record):
    """An optimizer that steps."""

    made: Location | None
    name: str  # of its class
    is_fused: bool
    obstacle: str | None  # why it could not be fused


@dataclass(frozen=True)
class SeenCall(Record):
    """A line that calls a whole model."""

    place: Location
    name: str  # what that line calls the model
    convolutions: int  # over images, in fp32
    is_channels_last: bool
    is_autocast: bool
    is_trained: bool = False  # a backward pass follows
    has_grad: bool = False  # in evaluation mode, its results still record a graph


@dataclass(frozen=True)
class SeenLine(Record):
    """A line and how often something happens there in a step."""

    what: str
    place: Location
    times: float


@dataclass(frozen=True)
class SeenGrowth(Record):
    """A variable that holds on to the graphs of earlier steps."""

    name: str
    file: str
    line: int  # that runs when a step ends, in the function that has the variable


@dataclass(frozen=True)
class SeenScript(Record):
    """A look at some steps of the script."""

    device: str
    device_name: str
    steps: int  # that were made in all
    has_ended: bool  # by itself: there are no more
    step: float  # seconds, the mean after the warm-up
    files: tuple[str, ...]  # of the person's own code
    loaders: tuple[SeenLoader, ...]
    optimizers: tuple[SeenOptimizer, ...]
    calls: tuple[SeenCall, ...]
    backwards: tuple[Location, ...]  # lines of backward()
    lines: tuple[SeenLine, ...]
    growth: tuple[SeenGrowth, ...]
    has_anomaly_mode: bool
    matmuls: dict[str, float]  # floating-point operations of a step by precision
    matmul_precision: str  # torch.get_float32_matmul_precision()
    searches_algorithms: bool  # torch.backends.cudnn.benchmark

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def often(self, *kinds: str) -> list[SeenLine]:
        """Lines at which one of these things happens in about every step."""
        return [line for line in self.lines if line.what in kinds and line.times >= OFTEN]

    @property
    def waited(self) -> float:
        """Share of a step in which the script waits for data."""
        return min(sum(loader.wait for loader in self.loaders) / self.step, 1.0) if self.step else 0.0
