"""Memory that operations take besides their results: what cuBLAS, cuDNN and attention need for themselves.

What is not here needs no model, because it is a tensor that the engine sees: the temporaries of foreach optimizers, the
casts that autocast keeps, the scale of a `GradScaler`.
"""

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import Operation
from hotloop.apps.simulate.families import NEEDS, convolution, disordered, kind_of
from hotloop.apps.simulate.families.base import base_name, in_doubt
from hotloop.apps.simulate.families.convolution import CONVOLUTION, Asked, asked, planned
from hotloop.apps.simulate.families.matmul import BLAS
from hotloop.apps.simulate.library_memory import Constants, measured_operations
from hotloop.apps.simulate.need import Need, together
from hotloop.apps.simulate.work import switches

__all__ = ["CONVOLUTION", "Asked", "asked", "library", "measured_as", "needs", "planned", "with_settings"]

_PLAIN = ("view", "pointwise", "copy", "fill", "random", "gather", "optimizer-foreach", "optimizer-fused")


def needs(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """What an operation takes besides its results, in the order in which it takes it."""
    name = base_name(operation)
    copies = together(Need(each.nbytes, "copy in order", ahead=0) for each in disordered(operation, name))
    own = NEEDS.get(name, _unmeasured)(operation, card, constants)
    return (*copies, *(need for need in own if need.bytes > 0 or need.high is not None))


def with_settings(operation: Operation) -> Operation:
    """An operation with the settings that cuDNN chooses its plan by."""
    return convolution.with_settings(operation, allow_tf32=switches().cudnn)


def library(operation: Operation) -> str | None:
    """The library that an operation loads at its first use: blas, cudnn or attention."""
    name = base_name(operation)
    if name in BLAS:
        return "blas"
    if "convolution" in name or name.startswith(("_cudnn", "cudnn")):
        return "cudnn"
    return "attention" if "attention" in name else None


def _unmeasured(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """What no rule is known for: nothing where it ran in a training that was measured, or works on elements."""
    known = measured_as(operation)
    if known is None or known in measured_operations():
        return ()
    return (in_doubt(operation, f"{base_name(operation)} in this precision is in no training that was measured"),)


def measured_as(operation: Operation) -> str | None:
    """The name by which the table of measured operations knows an operation; None: its kind takes nothing for itself.

    >>> measured_as(Operation("aten.argmax.default", (), ())), measured_as(Operation("aten.relu.default", (), ()))
    ('argmax/full', None)
    """
    kind = kind_of(operation.name)
    if (kind.known and kind.family in _PLAIN) or base_name(operation) in NEEDS:
        return None
    half = any(shape.dtype in ("bfloat16", "float16") for shape in (*operation.inputs, *operation.outputs))
    return f"{base_name(operation)}/{'half' if half else 'full'}"
