"""Memory that cuDNN takes for a convolution: what it took for the nearest one that was measured.

cuDNN chooses among kernels that need nothing, copies of operands in another layout, or several times the operands; and
its choice has steps, so that no smooth function follows it. A table therefore keeps each measurement as shares of the
operands (1 is a copy of it), and a convolution takes what the most similar one took.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import log2, prod
from typing import NamedTuple

FEW = 8  # channels, below which tensor cores want them padded
_PADDED = (4, 8)  # channels that few are padded to
_SLACK = 1024  # bytes: alignments and counters, which are no copy of anything
_MANY = 4  # times the operands: more is rare
_SAME = 0.5  # the distance of two convolutions that are taken for the same
_LARGE = 0.5  # of the operands: what is more grows with them, what is less is a buffer of one size


class Case(NamedTuple):
    """A convolution without its values."""

    batch: int
    inputs: int  # channels
    outputs: int
    pixels: float  # of a side of the input
    kernel: float = 3  # its side
    stride: int = 1
    groups: int = 1
    dimensions: int = 2

    @property
    def kind(self) -> str:
        """Convolutions of two kinds have nothing in common."""
        if self.groups > 1:
            return "depthwise" if self.groups == self.inputs else "grouped"
        if self.dimensions == 3:
            return "volume"
        return "pointwise" if self.kernel == 1 else "spatial"

    @property
    def aligned(self) -> int:
        """By what the pixels of an image can be divided: pointwise, it is a product of matrices of that length."""
        number = round((self.pixels / self.stride) ** self.dimensions)
        return next(by for by in (8, 4, 1) if number % by == 0)


class Plan(NamedTuple):
    """What one convolution took, as it was measured."""

    case: Case
    x: float  # shares of the bytes of its operands
    weight: float
    y: float
    fixed: float  # and bytes

    def __str__(self) -> str:
        return " ".join(f"{number:.10g}" for number in (*self.case, *(round(each, 3) for each in self[1:])))

    @classmethod
    def read(cls, words: str) -> "Plan":
        """A plan as a table has it.

        >>> Plan.read("32 64 64 56 3 1 1 2 1 1 0 512").fixed
        512.0
        """
        batch, inputs, outputs, pixels, kernel, stride, groups, dimensions, *shares = map(float, words.split())
        channels = int(batch), int(inputs), int(outputs)
        return cls(Case(*channels, pixels, kernel, int(stride), int(groups), int(dimensions)), *shares)


def case_of(x: Sequence[int], weight: Sequence[int], stride: int = 1, groups: int = 1) -> Case:
    """The case of an input and a weight of these sizes.

    >>> case_of((8, 3, 224, 224), (64, 3, 7, 7), stride=2)
    Case(batch=8, inputs=3, outputs=64, pixels=224.0, kernel=7.0, stride=2, groups=1, dimensions=2)
    """
    dimensions = max(2, len(x) - 2)  # one dimension is run as an image of one row
    pixels, kernel = (round(prod(sizes[2:]) ** (1 / dimensions), 3) for sizes in (x, weight))
    return Case(x[0], x[1], weight[0], pixels, kernel, stride, groups, dimensions)


def taken(rows: tuple[str, ...], case: Case, x: int, weight: int, y: int) -> int:
    """Bytes that a convolution takes beside its result, by the plan of the nearest one in a table."""
    plan = nearest(rows, case)
    if plan is None:
        return 0
    share = plan.x
    if plan.case.inputs < FEW > case.inputs and share > 1:
        share *= plan.case.inputs / case.inputs  # it was padded to a number of channels, and so will this be
    return int(share * x + plan.weight * weight + plan.y * y + plan.fixed)


@lru_cache(maxsize=4096)
def nearest(rows: tuple[str, ...], case: Case) -> Plan | None:
    """The plan of the most similar convolution of a table; None where it has none.

    One that takes many times its operands is the choice for that size alone: it counts for hardly any other.
    """
    ranked = sorted(_plans(rows), key=lambda each: distance(each.case, case))
    usual = (p for p in ranked if min(p.x, p.weight, p.y) <= _MANY or distance(p.case, case) <= _SAME)
    return next(usual, None)


@lru_cache(maxsize=64)
def _plans(rows: tuple[str, ...]) -> tuple[Plan, ...]:
    return tuple(Plan.read(row) for row in rows)


def distance(a: Case, b: Case) -> float:
    """How unlike two convolutions are: the doublings between them, and more where kernels differ altogether."""
    channels = abs(log2(a.inputs / b.inputs)) + abs(log2(a.outputs / b.outputs))
    sides = abs(log2(a.pixels / a.stride * b.stride / b.pixels))
    shape = 5 * abs(log2(a.kernel / b.kernel)) + 5 * abs(log2(a.stride / b.stride))
    other = 100 * (a.kind != b.kind) + 10 * ((a.inputs < FEW) != (b.inputs < FEW))
    other += 10 * ((a.outputs < FEW) != (b.outputs < FEW))
    if a.kind == b.kind == "pointwise":
        other += 3 * (a.aligned != b.aligned)
    return channels + sides + shape + other + abs(log2(a.batch / b.batch)) / 4


def plan_of(part: str, case: Case, x: int, weight: int, y: int, bytes_taken: int) -> Plan:
    """Bytes that were measured for a part, as copies of operands and a rest, in the way that leaves least.

    Of an input and an output of the same size, the one that is read is copied before the one that is written.
    """
    operands = x + weight + y
    paddings = [1.0] + [to / case.inputs for to in _PADDED if case.inputs < FEW]
    ways = [
        (share, whole, result, bytes_taken - share * x - whole * weight - result * y)
        for share, whole, result in product((0.0, *paddings), (0.0, 1.0), (0.0, 1.0))
    ]
    ways = [way for way in ways if way[3] > -_SLACK]
    written = 0 if part == "input" else 2
    unlikely = lambda way: abs(way[3]) / operands + sum(way[:3]) / 1000 + way[written] / 10000  # noqa: E731
    share, whole, result, rest = min(ways, key=unlikely)
    if rest > _LARGE * operands:
        more = rest / operands
        return Plan(case, share + more, whole + more, result + more, 0)
    return Plan(case, share, whole, result, max(0, rest))
