"""What happens on the simulated device, in order: the engine tells it, models of memory and time listen."""

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotloop.placement.sites import Site  # which imports torch


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor without its values."""

    sizes: tuple[int, ...]
    dtype: str  # as torch names it: float32, bfloat16, int64
    itemsize: int
    device: str = "cuda"  # cuda or cpu
    channels_last: bool = False
    strides: tuple[int, ...] = ()  # in numbers; none: it is contiguous

    @property
    def is_dense(self) -> bool:
        """Whether it lies in one piece, in one of the orders that kernels take."""
        return not self.strides or self.channels_last

    @property
    def either_order(self) -> bool:
        """Whether its channels are last, or it has no other order."""
        return self.channels_last or len(self.sizes) != 4 or 1 in (self.sizes[1], self.sizes[2] * self.sizes[3])

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on the device: one call of a kernel, or of a few."""

    name: str  # with its overload, such as aten.convolution.default
    inputs: tuple[Shape, ...]  # the tensors among its arguments, in order
    outputs: tuple[Shape, ...]
    arguments: dict[str, Any] = field(default_factory=dict)  # the others, plain, by the names of its schema
    phase: str = "other"  # forward, backward, optimizer, other
    module: str = ""  # path of the module that it runs in, where that is known
    place: "Site | None" = None


class Listener:
    """Hears everything, in the order in which a GPU would get it; what is not overridden is heard and forgotten."""

    def allocated(self, key: int, size: int, kind: str) -> None:
        """A tensor's memory came to be; kinds: parameter, gradient, optimizer, activation, input, buffer, temporary.

        May raise `torch.OutOfMemoryError`, which is raised at the person's line.
        """

    def freed(self, key: int) -> None:
        """And went."""

    def named(self, key: int, kind: str) -> None:
        """What a memory is turned out to be something else, such as a parameter."""

    def before(self, operation: Operation) -> None:
        """An operation is about to run: memory that it takes for itself alone is taken now."""

    def after(self, operation: Operation) -> None:
        """It is queued, its results are allocated, and what it took for itself is free again."""

    def copied(self, size: int, direction: str, *, pinned: bool, blocking: bool, place: "Site | None") -> None:
        """Bytes go between host and device."""

    def waited(self, kind: str, place: "Site | None") -> None:
        """The host waits for the device."""

    def loaded(self, seconds: float, workers: int) -> None:
        """The host made a batch, for so long here; so many workers would share them."""

    def step(self) -> None:
        """An optimizer has made a step."""

    def to_record(self) -> dict[str, Any]:
        """What it has to say, by the names of the fields of a `Simulation`."""
        return {}
