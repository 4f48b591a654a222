"""What was measured of a convolution's workspace, as copies of its operands: a row of the tables of memory."""

from functools import lru_cache
from itertools import product

from hotloop.apps.simulate.convolution_workspaces import FEW, Case, ConvolutionTiming

_PADDED = (4, 8)  # channels that few are padded to
_SLACK = 1024  # bytes: alignments and counters, which are no copy of anything
_LARGE = 0.5  # of the operands: what is more grows with them, what is less is a buffer of one size


def plan_of(part: str, case: Case, x: int, weight: int, y: int, bytes_taken: int) -> ConvolutionTiming:
    """Bytes that were measured for a part, as copies of operands and a rest, in the way that leaves least.

    Of an input and an output of the same size, the one that is read is copied before the one that is written.
    """
    operands = x + weight + y
    best, least = (0.0, 0.0, 0.0, 0.0, 0.0), float("inf")
    per_image = case.gradients
    for share, whole, result, each, copies, late in _ways(
        min(case.inputs, FEW), min(case.outputs, FEW), part == "weight" and case.kernel == 1, part == "input"
    ):
        rest = bytes_taken - share * x - whole * weight - result * y - each * per_image
        unlikely = abs(rest) / operands + copies + late
        if rest > -_SLACK and unlikely < least:
            best, least = (share, whole, result, each, rest), unlikely
    share, whole, result, each, rest = best
    if rest > _LARGE * operands:
        more = bytes_taken / operands
        return ConvolutionTiming(case, more, more, more, 0, 0)
    return ConvolutionTiming(case, share, whole, result, each, max(0, rest))


@lru_cache(maxsize=256)
def _ways(inputs: int, outputs: int, images: bool, reads_y: bool) -> tuple[tuple[float, ...], ...]:
    """Shares of the operands and of gradients that may be copied, and how unlikely that is beside what it leaves."""
    of_x, of_y = ((0.0, 1.0, *(to / few for to in _PADDED if few < FEW)) for few in (inputs, outputs))
    ways = product(of_x, (0.0, 1.0), of_y, (0.0, 1.0) if images else (0.0,))
    return tuple((*way, sum(way) / 1000, way[0 if reads_y else 2] / 10000) for way in ways)
