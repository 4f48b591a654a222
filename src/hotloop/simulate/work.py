"""What an operation asks of a card: floating-point operations, bytes to and from its memory, kernels to launch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hotloop.simulate import products
from hotloop.simulate.events import Operation, Shape
from hotloop.simulate.families import POINTWISE, VIEW, Kind, kind_of, launches
from hotloop.simulate.ordering import disordered
from hotloop.simulate.products import Product
from hotloop.simulate.traits import (
    is_transposed,
    of_attention,
    of_convolution,
    of_product,
    of_recurrence,
    traits_of,
    variant_of,
)

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64", "complex128": "fp64"}
_SORTING = ("sort", "topk", "randperm", "_unique2", "unique_dim", "multinomial", "kthvalue", "median", "nonzero")
_TWICE_READ = ("batch_norm", "group_norm")  # statistics first, then the values again
_CLEARED_FIRST = ("constant_pad_nd", "slice_backward", "select_backward", "diagonal_backward", "unfold_backward")


class Tf32(NamedTuple):
    """Where fp32 products may be computed in TF32; PyTorch's defaults."""

    products: bool = False
    cudnn: bool = True


_DEFAULT = Tf32()


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of work of one family, such as the gradient of a convolution's weight."""

    family: str
    bytes: float = 0.0  # read and written
    flops: float = 0.0  # of products; others are bound by memory
    precision: str = "fp32"
    kernels: int = 1
    product: Product | None = None
    layout: str = ""  # of images: channels_last, or contiguous
    variant: str = ""  # finer than the family: what kernel it is, such as the normalisation over layers or batches
    traits: tuple[int, ...] = ()  # sizes that tell how well it goes: operations with like ones go alike


def switches() -> Tf32:
    """PyTorch's TF32 switches as they are now."""
    import torch  # noqa: PLC0415  # whoever reads a table does not need it

    try:
        products_too = torch.get_float32_matmul_precision() != "highest"
        return Tf32(products_too, bool(torch.backends.cudnn.allow_tf32))
    except RuntimeError:  # set through the newer switches, which forbids to ask through the older
        return Tf32(
            getattr(torch.backends.cuda.matmul, "fp32_precision", "none") == "tf32",
            getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", "tf32") == "tf32",
        )


def parts_of(operation: Operation, tf32: Tf32 = _DEFAULT) -> tuple[Part, ...]:
    """The work of an operation; none for views and for what only asks for memory.

    >>> a = Shape((128, 256), "bfloat16", 2)
    >>> b, c = Shape((256, 64), "bfloat16", 2), Shape((128, 64), "bfloat16", 2)
    >>> [part] = parts_of(Operation("aten.mm.default", (a, b), (c,)))
    >>> part.family, part.flops, part.bytes, part.precision
    ('gemm', 4194304, 114688, 'bf16')
    """
    kind = kind_of(operation.name)
    if kind.family == VIEW or not _on_device(operation):
        return ()
    try:
        copies = (Part("copy", 2.0 * each.nbytes, variant="transposed") for each in disordered(operation, kind.base))
        return (*_parts(operation, kind, tf32), *copies)
    except (IndexError, ValueError, TypeError, ZeroDivisionError):  # an overload whose arguments are not as foreseen
        return (Part(POINTWISE, _all(operation)),)


def _on_device(operation: Operation) -> bool:
    """Copies to and from the host are told of on their own, and keep no kernel busy."""
    shapes = (*operation.inputs, *operation.outputs)
    anywhere = kind_of(operation.name).family != "copy"
    return (any if anywhere else all)(shape.device == "cuda" for shape in shapes)


def _parts(operation: Operation, kind: Kind, tf32: Tf32) -> tuple[Part, ...]:
    family = kind.family
    if family == "gemm":
        product = products.matrix_product(operation, kind.base)
        precision = precision_of(operation, tf32=tf32.products)
        traits = of_product(product)
        return (Part(family, _all(operation), product.flops, precision, product=product, traits=traits),)
    if family == "conv":
        return _convolution(operation, tf32)
    if family == "conv-backward":
        return tuple(_convolution_backward(operation, tf32))
    if family.startswith("attention"):
        backward = family.endswith("backward")
        flops = products.attention(operation, kind.base, backward=backward)
        precision = precision_of(operation, tf32=tf32.products)
        traits = of_attention(operation, kind.base, backward=backward)
        variant = "efficient" if "efficient" in kind.base else "flash"
        kernels = 3 if backward else 1
        return (Part(family, _all(operation), flops, precision, kernels, variant=variant, traits=traits),)
    if family.startswith("rnn"):
        flops, steps = products.recurrent(operation, backward=family.endswith("backward"))
        precision = precision_of(operation, tf32=tf32.cudnn)
        traits = of_recurrence(operation, steps)
        return (Part(family, _all(operation), flops, precision, 2 * steps, traits=traits),)
    if family.startswith("optimizer"):
        return _of_lists(operation, kind)
    size, kernels = _traffic(operation, kind)
    variant = variant_of(operation, kind)
    images = family == "pooling" or variant in ("batch", "group")
    layout = _layout(operation.inputs[:1]) if images else ""
    traits = traits_of(operation, kind, variant)
    return (Part(family, size, 0.0, precision_of(operation), kernels, None, layout, variant, traits),)


def _convolution(operation: Operation, tf32: Tf32) -> tuple[Part, ...]:
    product = products.convolution(operation)
    alone = products.depthwise(operation, 1)  # and then no matrix product: each channel is moved more than computed
    precision = precision_of(operation, tf32=tf32.cudnn)
    layout = _layout(operation.inputs[:2])
    family, matrices = ("depthwise", None) if alone else ("conv", product)
    if is_transposed(operation) and not alone:  # cuDNN does it as the gradient of the image of another one
        family, matrices = "conv-backward-input", _turned(product)
    variant, traits = of_convolution(product, operation.inputs[1].sizes, operation)
    variant = "" if alone else variant
    main = Part(family, _all(operation), product.flops, precision, 1, matrices, layout, variant, traits)
    # cuDNN is not asked to add the bias: a second kernel does, in place.
    return (main, Part(POINTWISE, 2.0 * operation.outputs[0].nbytes)) if len(operation.inputs) > 2 else (main,)


def _convolution_backward(operation: Operation, tf32: Tf32) -> Iterable[Part]:
    out, image, weight = operation.inputs[:3]
    precision = precision_of(operation, tf32=tf32.cudnn)
    layout = _layout((out, image, weight))
    alone = products.depthwise(operation, 2)
    family = "depthwise-backward" if alone else "conv-backward"
    total = out.nbytes + image.nbytes + weight.nbytes  # each gradient is of the size of what it is the gradient of
    for name, product in zip(("input", "weight"), products.convolution_backward(operation), strict=True):
        if product is not None:
            matrices = None if alone else product
            variant, traits = of_convolution(product, weight.sizes, operation)
            variant = "" if alone else variant
            chosen = f"{family}-{name}"
            if name == "input" and not alone and is_transposed(operation):
                chosen, matrices = "conv", _turned(product)
            yield Part(chosen, total, product.flops, precision, 1, matrices, layout, variant, traits)
    mask = operation.arguments.get("output_mask", (True, True, True))
    if len(mask) > 2 and mask[2]:
        yield Part("reduction", out.nbytes, precision=precision_of(operation), variant="rows")


def _turned(product: Product) -> Product:
    return Product(product.count, product.rows, product.inner, product.columns)


def _of_lists(operation: Operation, kind: Kind) -> tuple[Part, ...]:
    """Foreach and fused operations: the lists come one after another, and are as long as one another."""
    total = _bytes(operation.inputs)
    lists = kind.lists
    if kind.family == "optimizer-fused":
        absent = kind.base.startswith("_fused_adam") and not operation.arguments.get("amsgrad", False)
        absent = absent or (kind.base == "_fused_sgd" and not operation.arguments.get("momentum", 0.0))
        lists -= int(absent)
    length = max((len(operation.inputs) - kind.singles) // max(lists, 1), 0)
    first, second = operation.inputs[:length], operation.inputs[length : 2 * length]
    if kind.family == "optimizer-fused":
        written = total - _bytes(second)  # all but the gradients
    else:
        written = _bytes(first) if kind.in_place else _bytes(operation.outputs)
    count = launches([shape.numel for shape in first], lists + (not kind.in_place))
    moved = total + written
    return (Part(kind.family, moved, kernels=count, traits=(len(first), moved)),) if count else ()


def _traffic(operation: Operation, kind: Kind) -> tuple[float, int]:
    """Bytes read and written, and kernels launched, of what memory alone bounds."""
    family, base = kind.family, kind.base
    read, written = _bytes(operation.inputs), _bytes(operation.outputs)
    if base in _SORTING:
        return 8.0 * (read + written), 8  # passes over digits
    if family == "fill" or (family == "random" and kind.in_place):
        return written or read, 1
    if base == "copy":
        return 2.0 * _bytes(operation.inputs[-1:]) if kind.in_place else _all(operation), 1
    if base in _CLEARED_FIRST:
        return read + 2.0 * written, 2
    if family == "gather":
        indices = _bytes(operation.inputs[1:])
        if base.startswith("nll_loss"):
            return 2.0 * indices + written, 1
        return indices + 2.0 * written, 1
    if family == "scatter":
        return _scattered(operation, base)
    if family.startswith("norm") and any(part in base for part in _TWICE_READ):
        return 2.0 * read + written, 2 if family == "norm" else 3
    if family == "norm-backward" and "softmax" not in base:
        return read + written, 3  # gradients of input and weights apart
    if family == "reduction" and _bytes(operation.inputs) > 1 << 22 and written <= 16:
        return read + written, 2
    return read + written, 1


def _scattered(operation: Operation, base: str) -> tuple[float, int]:
    written = _bytes(operation.outputs)
    if base.startswith("nll_loss"):
        return 2.0 * written, 2
    if base.endswith("backward"):  # cleared, then added to in the order of the sorted indices
        given, *indices = operation.inputs
        many = _bytes(indices[:1]) / 8 > 3072  # fewer are added up without sorting
        return written + 3.0 * given.nbytes + 8.0 * _bytes(indices[:1]), 10 if many else 2
    own, *others = operation.inputs
    return 3.0 * _bytes(others) + (0 if operation.name.split(".")[1].endswith("_") else 2 * own.nbytes), 2


def precision_of(operation: Operation, *, tf32: bool = False) -> str:
    """The precision in which an operation is computed; `tf32` says whether products in fp32 may be.

    >>> precision_of(Operation("aten.mm.default", (Shape((2, 2), "float32", 4),), ()), tf32=True)
    'tf32'
    """
    for shape in (*operation.inputs, *operation.outputs):
        if shape.dtype == "float32":
            return "tf32" if tf32 else "fp32"
        if shape.dtype.startswith("float8"):
            return "fp8"
        if shape.dtype in _PRECISIONS:
            return _PRECISIONS[shape.dtype]
    return "fp32"


def _layout(shapes: Iterable[Shape]) -> str:
    return "channels_last" if any(shape.channels_last for shape in shapes) else "contiguous"


def _bytes(shapes: Iterable[Shape]) -> int:
    return sum(shape.nbytes for shape in shapes if shape.device == "cuda")


def _all(operation: Operation) -> int:
    return _bytes(operation.inputs) + _bytes(operation.outputs)
