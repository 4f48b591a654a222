"""Memory that cuDNN takes for a convolution: what it took for the nearest one that was measured.

cuDNN chooses among kernels that need nothing, copies of operands in another layout, or several times the operands; and
its choice has steps, so that no smooth function follows it. A table therefore keeps each measurement as shares of the
operands (1 is a copy of it) and of a gradient of the weight for every image, and a convolution takes what the most
similar one took.
"""

import sys
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FEW = 8  # channels, below which tensor cores want them padded
_NEIGHBOURS = 8  # measurements that are asked how sure the nearest is
_ALIKE = 50.0  # distance within which two convolutions are of one kind
_ROW = " ".join(["%.10g"] * 14)  # numbers of a case and its shares
FAR = 4.0  # distance from which on a measurement says little: one of two is then off by a copy of an operand


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
    dilation: int = 1

    @property
    def kind(self) -> str:
        """Convolutions of two kinds have nothing in common."""
        if self.groups > 1:
            return "depthwise" if self.groups == self.inputs else "grouped"
        if self.dimensions != 2:
            return "volume" if self.dimensions == 3 else "sequence"
        return "pointwise" if self.kernel == 1 else "spatial"

    @property
    def gradients(self) -> float:
        """Bytes of the weight's gradient in fp32, once for every image."""
        return 4.0 * self.batch * self.inputs // self.groups * self.outputs * self.kernel**self.dimensions


class ConvolutionTiming(NamedTuple):
    """What one convolution took, as it was measured."""

    case: Case
    x: float  # shares of the bytes of its operands
    weight: float
    y: float
    images: float  # of the weight's gradient in fp32, once for every image of the batch
    fixed: float  # and bytes

    def __str__(self) -> str:
        return _ROW % (*self.case, *(round(each, 3) for each in self[1:]))

    @classmethod
    def read(cls, words: str) -> "ConvolutionTiming":
        """A plan as a table has it.

        >>> ConvolutionTiming.read("32 64 64 56 3 1 1 2 1 1 1 0 0 512").fixed
        512.0
        """
        batch, inputs, outputs, pixels, kernel, *rest = map(float, words.split())
        stride, groups, dimensions, dilation, *shares = rest
        case = Case(int(batch), int(inputs), int(outputs), pixels, kernel, *map(int, (stride, groups)))
        return cls(case._replace(dimensions=int(dimensions), dilation=int(dilation)), *shares)

    def bytes_for(self, case: Case, x: int, weight: int, y: int) -> int:
        """What another convolution takes by this plan; its operands have so many bytes."""
        of_x = _padded(self.x, self.case.inputs, case.inputs)
        of_y = _padded(self.y, self.case.outputs, case.outputs)
        return int(of_x * x + self.weight * weight + of_y * y + self.images * case.gradients + self.fixed)


def case_of(x: Sequence[int], weight: Sequence[int], stride: int = 1, groups: int = 1, dilation: int = 1) -> Case:
    """The case of an input and a weight of these sizes.

    >>> case_of((8, 3, 224, 224), (64, 3, 7, 7), stride=2)
    Case(batch=8, inputs=3, outputs=64, pixels=224.0, kernel=7.0, stride=2, groups=1, dimensions=2, dilation=1)
    """
    dimensions = len(x) - 2
    pixels, kernel = (round(prod(sizes[2:]) ** (1 / dimensions), 3) for sizes in (x, weight))
    return Case(x[0], x[1], weight[0], pixels, kernel, stride, groups, dimensions, dilation if kernel > 1 else 1)


class Workspace(NamedTuple):
    """Bytes that a convolution takes beside its result, and how sure that is."""

    bytes: int  # by the plan of the nearest convolution that was measured
    low: int  # the least and the most by the plans of its neighbours, too
    high: int
    distance: float  # to the nearest


def workspace(rows: tuple[str, ...], case: Case, x: int, weight: int, y: int, *, beyond: float = 0.0) -> Workspace:
    """What a convolution takes, and what it may take: cuDNN's choice has steps, and neighbours lie on both sides.

    Where even the nearest is far, it may take nothing, or a copy of all operands. Measurements nearer than `beyond`
    are left out.
    """
    near = neighbours(rows, case, beyond)
    if not near:
        return Workspace(0, 0, x + weight + y, float("inf"))
    found = [plan.bytes_for(case, x, weight, y) for plan, _ in near]
    away = near[0][1]
    low, high = (0, max(*found, x + weight + y)) if away > FAR else (min(found), max(found))
    return Workspace(found[0], low, high, away)


def _padded(share: float, channels: int, wanted: int) -> float:
    """A share of few channels that was padded to a number of them, for another few, which will be padded to it too."""
    return share * channels / wanted if channels < FEW > wanted and share > 1 else share


@lru_cache(maxsize=4096)
def neighbours(rows: tuple[str, ...], case: Case, beyond: float = 0.0) -> tuple[tuple[ConvolutionTiming, float], ...]:
    """The plans of the most similar convolutions of a table and how far these are, the nearest first.

    None is nearer than `beyond`, and beside the nearest all are of its kind.
    """
    if not rows:
        return ()
    away: Array = np.abs(_read(rows) - _places(np.array([case], dtype=float))).sum(axis=1)
    if beyond:
        away[away < beyond] = np.inf
    last = np.partition(away, _NEIGHBOURS - 1)[_NEIGHBOURS - 1] if len(away) > _NEIGHBOURS else np.inf
    within = np.flatnonzero(away <= min(last, sys.float_info.max))
    order = within[np.argsort(away[within], kind="stable")[:_NEIGHBOURS]]  # of equals the one that was measured first
    near = [(ConvolutionTiming.read(rows[int(row)]), float(away[row])) for row in order]
    return tuple(each for each in near if each[1] < near[0][1] + _ALIKE)


@lru_cache(maxsize=64)
def _read(rows: tuple[str, ...]) -> Array:
    """Where the convolutions of a table lie."""
    return _places(np.loadtxt(rows, usecols=range(len(Case._fields)), ndmin=2))


def _places(cases: Array) -> Array:
    """Cases as points, so that cuDNN chooses alike where they are near: by the sum of the differences.

    The weights are those by which what was measured is best foretold by its neighbours: the size of the whole input
    counts more than its side or its batch, and what a number of channels can be divided by counts for itself.
    """
    batch, inputs, outputs, pixels, kernel, stride, groups, dimensions, dilation = cases.T
    kinds = [
        (groups > 1) & (groups == inputs),
        (groups > 1) & (groups < inputs),
        (groups == 1) & (dimensions == 3),
        (groups == 1) & (dimensions == 2) & (kernel == 1),
        (groups == 1) & (dimensions == 1),
    ]
    return np.stack(
        [
            1.4 * np.log2(inputs),
            1.2 * np.log2(outputs),
            0.2 * np.log2(pixels / stride),
            0.6 * np.log2(batch * inputs * pixels**dimensions),
            10 * np.log2(kernel),
            2 * np.log2(stride),
            5 * (dilation > 1),
            0.3 * np.log2(dilation),
            15 * (inputs < FEW),
            15 * (outputs < FEW),
            0.6 * (inputs % 32 == 0),
            0.8 * (outputs % 64 == 0),
            *(100 * kind for kind in kinds),
        ],
        axis=1,
    )
