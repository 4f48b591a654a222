"""Foreach and fused operations, by which optimizers update all parameters at once, and gradient scaling."""

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import Operation
from hotloop.apps.simulate.families.base import POINTWISE, Family, Kind
from hotloop.apps.simulate.library_memory import Constants
from hotloop.apps.simulate.need import Need
from hotloop.apps.simulate.products import Tf32, WorkPart, bytes_of

FOREACH, FUSED = "optimizer-foreach", "optimizer-fused"
_MOST_TENSORS = (110, 64, 48, 36, 30)  # that one launch of PyTorch's multi-tensor kernels takes, by the number of lists
_MOST_CHUNKS = 320
_CHUNK = 65_536  # elements


def launches(numbers: list[int], lists: int) -> int:
    """How many kernels a foreach or fused operation launches on tensors of so many elements.

    >>> launches([1000] * 100, lists=4), launches([65_536 * 640], lists=2), launches([], lists=2)
    (3, 2, 0)
    """
    most = _MOST_TENSORS[min(max(lists, 1), len(_MOST_TENSORS)) - 1]
    chunks = sum(-(-number // _CHUNK) for number in numbers)
    return max(-(-len(numbers) // most), -(-chunks // _MOST_CHUNKS))


def _work(operation: Operation, kind: Kind, _tf32: Tf32) -> tuple[WorkPart, ...]:
    """The lists come one after another, and are as long as one another."""
    total = bytes_of(operation.inputs)
    lists = kind.lists
    if kind.family == FUSED:
        absent = kind.base.startswith("_fused_adam") and not operation.arguments.get("amsgrad", False)
        absent = absent or (kind.base == "_fused_sgd" and not operation.arguments.get("momentum", 0.0))
        lists -= int(absent)
    length = max((len(operation.inputs) - kind.singles) // max(lists, 1), 0)
    first, second = operation.inputs[:length], operation.inputs[length : 2 * length]
    if kind.family == FUSED:
        written = total - bytes_of(second)  # all but the gradients
    else:
        written = bytes_of(first) if kind.in_place else bytes_of(operation.outputs)
    count = launches([shape.numel for shape in first], lists + (not kind.in_place))
    moved = total + written
    return (WorkPart(kind.family, moved, kernels=count, traits=(len(first), moved)),) if count else ()


def _norm(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """A partial sum for each chunk, as many for every tensor as for the largest."""
    if not operation.inputs:
        return ()
    chunks = max(-(-shape.numel // _CHUNK) for shape in operation.inputs)
    return (Need(4 * chunks * len(operation.inputs), "partial norms"),)


FAMILY = Family(
    members={"reduction": "_foreach_norm", POINTWISE: "_amp_update_scale"},
    work={FOREACH: _work, FUSED: _work},
    needs={"_foreach_norm": _norm},
    host={"_foreach_copy_": {"self", "src"}},
)
