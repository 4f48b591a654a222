"""What an operation asks of a card: floating-point operations, bytes to and from its memory, kernels to launch."""

import torch

from hotloop.apps.simulate.events import Operation, Shape
from hotloop.apps.simulate.families import disordered, kind_of, work_of
from hotloop.apps.simulate.families.base import POINTWISE, VIEW
from hotloop.apps.simulate.products import Tf32, WorkPart, bytes_moved

__all__ = ["Shape", "Tf32", "WorkPart", "parts_of", "switches"]

_DEFAULT = Tf32()


def switches() -> Tf32:
    """PyTorch's TF32 switches as they are now."""
    try:
        products_too = torch.get_float32_matmul_precision() != "highest"
        return Tf32(products_too, bool(torch.backends.cudnn.allow_tf32))
    except RuntimeError:  # set through the newer switches, which forbids to ask through the older
        return Tf32(
            getattr(torch.backends.cuda.matmul, "fp32_precision", "none") == "tf32",
            getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", "tf32") == "tf32",
        )


def parts_of(operation: Operation, tf32: Tf32 = _DEFAULT) -> tuple[WorkPart, ...]:
    """The work of an operation; none for views and for what only asks for memory.

    >>> a = Shape((128, 256), "bfloat16", 2)
    >>> b, c = Shape((256, 64), "bfloat16", 2), Shape((128, 64), "bfloat16", 2)
    >>> [part] = parts_of(Operation("aten.mm.default", (a, b), (c,)))
    >>> part.family, part.flops, part.bytes, part.precision
    ('gemm', 4194304, 114688, 'bf16')
    """
    kind = kind_of(operation.name)
    if kind.family == VIEW or not _on_device(operation, everywhere=kind.family == "copy"):
        return ()
    try:
        copies = (
            WorkPart("copy", 2.0 * each.nbytes, variant="transposed") for each in disordered(operation, kind.base)
        )
        return (*work_of(kind)(operation, kind, tf32), *copies)
    except (IndexError, ValueError, TypeError, ZeroDivisionError):  # an overload whose arguments are not as foreseen
        return (WorkPart(POINTWISE, bytes_moved(operation)),)


def _on_device(operation: Operation, *, everywhere: bool) -> bool:
    """Copies to and from the host are told of on their own, and keep no kernel busy."""
    shapes = (*operation.inputs, *operation.outputs)
    return (all if everywhere else any)(shape.device == "cuda" for shape in shapes)
