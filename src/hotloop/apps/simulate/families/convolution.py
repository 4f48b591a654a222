"""Convolutions and their gradients: the matrix products that they are, and what cuDNN takes for them.

What cuDNN took for the convolutions that were measured, and which of these is the nearest, is in `convolutions.py`.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import gcd, prod
from typing import NamedTuple

import torch

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.convolution_workspaces import FAR, Case, Workspace, case_of, workspace
from hotloop.apps.simulate.events import Operation, Shape
from hotloop.apps.simulate.families.base import POINTWISE, Family, Kind
from hotloop.apps.simulate.families.reduction import buffers
from hotloop.apps.simulate.library_memory import Constants, measured
from hotloop.apps.simulate.need import Need
from hotloop.apps.simulate.products import Product, Tf32, WorkPart, bytes_moved, layout_of, precision_of

CONVOLUTION = "convolution workspace"
_BY_CUDNN = ("convolution", "_convolution", "cudnn_convolution", "cudnn_convolution_transpose")
_ALL = (True, True, True)


def _product(image: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...], operation: Operation) -> Product:
    """A convolution as the product that it is: places × output channels, over what one output sees."""
    groups = int(operation.arguments.get("groups", 1) or 1)
    spatial = len(weight) - 2
    places = prod((image if _is_transposed(operation) else out)[-spatial:]) if spatial else 1
    batch = image[0] if len(image) == len(weight) else 1  # one image may come without a batch
    seen = weight[1] * prod(weight[2:])
    return Product(groups, batch * places, max(weight[0] // groups, 1), seen)


def _is_transposed(operation: Operation) -> bool:
    return bool(operation.arguments.get("transposed", False)) or "transpose" in operation.name


def _is_depthwise(operation: Operation, weight: int) -> bool:
    """Whether each channel is convolved by itself; `weight` says which of the inputs holds the filters."""
    groups = int(operation.arguments.get("groups", 1) or 1)
    return groups > 1 and operation.inputs[weight].sizes[1] == 1


def _turned(product: Product) -> Product:
    return Product(product.count, product.rows, product.inner, product.columns)


def _sizes(product: Product, weight: tuple[int, ...], operation: Operation) -> tuple[str, tuple[int, ...]]:
    """Variant, and places, channels read and written, the area of the window, the stride."""
    area = prod(weight[2:])
    stride = operation.arguments.get("stride") or (1,)
    step = max(stride) if isinstance(stride, list | tuple) else int(stride)
    if min(weight[:2]) <= 4:
        variant = "colours"  # of an image, which are too few for the quick kernels
    elif area == 1 and step == 1:
        variant = "1x1"  # a product of matrices as they lie
    else:
        variant = ""
    places = product.flops // (2 * max(prod(weight), 1))  # whichever gradient it is
    return variant, (places, weight[1], weight[0], area, step, gcd(weight[0], weight[1], 64))


def _forward(operation: Operation, _kind: Kind, tf32: Tf32) -> tuple[WorkPart, ...]:
    image, weight = operation.inputs[0].sizes, operation.inputs[1].sizes
    product = _product(image, weight, operation.outputs[0].sizes, operation)
    alone = _is_depthwise(operation, 1)  # and then no matrix product: each channel is moved more than computed
    precision = precision_of(operation, tf32=tf32.cudnn)
    layout = layout_of(operation.inputs[:2])
    family, matrices = ("depthwise", None) if alone else ("conv", product)
    if _is_transposed(operation) and not alone:  # cuDNN does it as the gradient of the image of another one
        family, matrices = "conv-backward-input", _turned(product)
    variant, traits = _sizes(product, weight, operation)
    variant = "" if alone else variant
    main = WorkPart(family, bytes_moved(operation), product.flops, precision, 1, matrices, layout, variant, traits)
    # cuDNN is not asked to add the bias: a second kernel does, in place.
    return (main, WorkPart(POINTWISE, 2.0 * operation.outputs[0].nbytes)) if len(operation.inputs) > 2 else (main,)


def _gradients(operation: Operation, tf32: Tf32) -> Iterable[WorkPart]:
    """Those of image and weight swap the roles of the product's three sides, so all have as many operations."""
    out, image, weight = operation.inputs[:3]
    forward = _product(image.sizes, weight.sizes, out.sizes, operation)
    to_image, to_weight = _turned(forward), Product(forward.count, forward.columns, forward.inner, forward.rows)
    mask = operation.arguments.get("output_mask", _ALL)
    precision = precision_of(operation, tf32=tf32.cudnn)
    layout = layout_of((out, image, weight))
    alone = _is_depthwise(operation, 2)
    family = "depthwise-backward" if alone else "conv-backward"
    total = out.nbytes + image.nbytes + weight.nbytes  # each gradient is of the size of what it is the gradient of
    asked_for = (mask[0], mask[1])
    for name, product, wanted in zip(("input", "weight"), (to_image, to_weight), asked_for, strict=True):
        if wanted:
            matrices = None if alone else product
            variant, traits = _sizes(product, weight.sizes, operation)
            variant = "" if alone else variant
            chosen = f"{family}-{name}"
            if name == "input" and not alone and _is_transposed(operation):
                chosen, matrices = "conv", _turned(product)
            yield WorkPart(chosen, total, product.flops, precision, 1, matrices, layout, variant, traits)
    if len(mask) > 2 and mask[2]:
        yield WorkPart("reduction", out.nbytes, precision=precision_of(operation), variant="rows")


def _in_another_order(x: Shape, weight: Shape, *others: Shape) -> tuple[Shape, ...]:
    """cuDNN gets all operands with their channels last where the input or the weight has them so, else none."""
    last = x.channels_last or weight.channels_last
    return tuple(each for each in (x, weight, *others) if not each.is_dense or (last and not each.either_order))


def with_settings(operation: Operation, *, allow_tf32: bool) -> Operation:
    """An operation with the settings that cuDNN chooses its plan by."""
    if "convolution" not in operation.name:
        return operation
    settings = {"allow_tf32": allow_tf32, "benchmark": torch.backends.cudnn.benchmark}
    return replace(operation, arguments={**operation.arguments, **settings})


class Asked(NamedTuple):
    """One part of a convolution (forward, input or weight), as a table is asked for its workspace."""

    keys: tuple[str, ...]  # of the table, the most particular first
    case: Case
    x: int  # bytes of its operands
    weight: int
    y: int


def asked(operation: Operation, card: Card) -> list[Asked]:
    """The parts of a convolution that cuDNN plans, in the order in which they run."""
    if "backward" not in operation.name:
        x, weight = operation.inputs[:2]
        return [_asked("forward", x, weight, operation.outputs[0], operation, card)]
    y, x, weight = operation.inputs[:3]
    wanted = operation.arguments.get("output_mask") or _ALL
    parts = [part for part, wants in zip(("input", "weight"), wanted, strict=False) if wants]
    return [_asked(part, x, weight, y, operation, card) for part in parts]


def _asked(part: str, x: Shape, weight: Shape, y: Shape, operation: Operation, card: Card) -> Asked:
    arguments = operation.arguments
    layout = "last" if x.channels_last or weight.channels_last else "first"
    if arguments.get("transposed"):  # which cuDNN runs as the gradient of the convolution from its output to its input
        part, x, y = {"forward": "input", "input": "forward"}.get(part, part), y, x
    precision = _precision(x, card, arguments.get("allow_tf32", True))
    keys = [f"{part}/{precision}/{layout}", f"{part}/half/{layout}"][: 2 if precision == "fp16" else 1]
    keys = [f"{key}/benchmark" for key in keys if arguments.get("benchmark")] + keys
    stride, dilation = (max(arguments.get(name) or (1,)) for name in ("stride", "dilation"))
    case = case_of(x.sizes, weight.sizes, stride, arguments.get("groups") or 1, dilation)
    return Asked(tuple(keys), case, x.nbytes, weight.nbytes, y.nbytes)


def _precision(x: Shape, card: Card, allow_tf32: bool) -> str:
    if x.itemsize == 2:
        return "fp16" if x.dtype == "float16" else "half"
    return "tf32" if x.dtype == "float32" and card.capability >= (8, 0) and allow_tf32 else "fp32"


def planned(part: Asked, constants: Constants, beyond: float = 0.0) -> Workspace:
    """The workspace of a part by a table, as if nothing nearer than `beyond` had been measured.

    What was measured on another architecture tells how far a table that was not measured may be off.
    """
    rows = next((constants.convolution[key] for key in part.keys if key in constants.convolution), ())
    found = workspace(rows, *part[1:], beyond=beyond)
    if constants.calibrated:
        return found
    others = [planned(part, each, beyond) for each in measured()]
    low = min([found.bytes, *(each.low for each in others)])
    high = max([found.bytes, *(each.high for each in others)])
    return found._replace(low=low, high=high, distance=float("inf"))


def _workspaces(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """What cuDNN's plans for the parts of a convolution take, one after the other."""
    found = [planned(part, constants) for part in asked(operation, card)]
    return tuple(
        Need(each.bytes, CONVOLUTION, least=0, low=each.low, high=each.high, doubt=_doubt(each)) for each in found
    )


def _doubt(found: Workspace) -> str:
    if found.distance == float("inf"):
        return "convolutions like it were not measured on this GPU"
    if found.distance > FAR:
        return f"no convolution like it was measured: the nearest has a distance of {found.distance:.1f}"
    return "cuDNN takes different plans for the convolutions nearest to it"


def _backward_needs(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """The gradient of the input first, then that of the weight: their workspaces are not held together."""
    y = operation.inputs[0]
    wanted = operation.arguments.get("output_mask") or _ALL
    found = [replace(need, ahead=number) for number, need in enumerate(_workspaces(operation, card, constants), 1)]
    bias = buffers(y, (0, *range(2, len(y.sizes))), card) if wanted[2] else ()
    return (*found, *bias)


FAMILY = Family(
    members={
        "conv": "convolution _convolution cudnn_convolution cudnn_convolution_transpose convolution_overrideable"
        " conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d _conv_depthwise2d conv_depthwise3d"
        " _slow_conv2d_forward cudnn_convolution_relu",
        "conv-backward": "convolution_backward _slow_conv2d_backward convolution_backward_overrideable",
    },
    work={"conv": _forward, "conv-backward": lambda operation, _, tf32: tuple(_gradients(operation, tf32))},
    needs={**dict.fromkeys(_BY_CUDNN, _workspaces), "convolution_backward": _backward_needs},
    copied={
        **dict.fromkeys(_BY_CUDNN, lambda operation: _in_another_order(*operation.inputs[:2])),
        "convolution_backward": lambda operation: _in_another_order(*operation.inputs[1:3], operation.inputs[0]),
    },
)
