"""Normalisation over batches, groups, layers and rows, softmax among them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotloop.apps.simulate._torch import aten
from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import Operation
from hotloop.apps.simulate.families.base import (
    Family,
    Forward,
    Gradient,
    Kept,
    Kind,
    contiguous,
    followed,
    image_of,
    moving,
    rows_of,
)
from hotloop.apps.simulate.library_memory import Constants
from hotloop.apps.simulate.need import RESULT, Need
from hotloop.apps.simulate.products import Tf32, WorkPart, bytes_moved, bytes_of

_VARIANTS = {
    "softmax": "softmax",
    "batch_norm": "batch",
    "group_norm": "group",
    "layer_norm": "layer",
    "rms_norm": "layer",
}
_OF_BATCHES = ("cudnn_batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
_SOFTMAX = ("_softmax", "_log_softmax")


def _work(operation: Operation, kind: Kind, _tf32: Tf32) -> tuple[WorkPart, ...]:
    """Over batches and groups statistics come first, then the values again; gradients of weights come apart."""
    forward = kind.family == "norm"
    variant = next((variant for part, variant in _VARIANTS.items() if part in kind.base), "")
    image = variant in ("batch", "group")
    size: float = bytes_moved(operation)
    kernels = 1 if forward or variant == "softmax" else 3
    if image:
        size, kernels = 2.0 * bytes_of(operation.inputs) + bytes_of(operation.outputs), 2 if forward else 3
    traits: tuple[int, ...] = ()
    if operation.inputs:
        largest = max(operation.inputs, key=lambda shape: shape.numel)
        traits = image_of(largest) if image else rows_of(largest)
    return moving(operation, kind, size, kernels, variant=variant, traits=traits, image=image)


def _of_batches(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    x = operation.inputs[0]
    if not operation.arguments.get("training", operation.arguments.get("train", True)) or not x.channels_last:
        return ()
    if x.dtype == "bfloat16":  # which PyTorch normalises by kernels of its own
        return ()
    half = ".half" if x.itemsize == 2 else ""
    reserve, moment = (constants.factors.get(f"batch_norm.{n}{half}", 0) * x.numel for n in ("reserve", "workspace"))
    return (Need(int(reserve), "batch norm reserve", RESULT), Need(int(moment), "batch norm workspace"))


def _safe_softmax(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    return (Need(operation.inputs[0].numel, "rows that are masked"),)


def _softmax_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    return (Need(operation.inputs[0].nbytes, "gradient times result"),)


def _batch_norm(of: dict[str, Any]) -> tuple[list[Any], None]:
    statistics = (of["running_mean"], of["running_var"], of["training"], of["exponential_average_factor"])
    return list(torch.native_batch_norm(of["input"], of["weight"], of["bias"], *statistics, of["epsilon"])), None


def _batch_norm_backward(of: dict[str, Any]) -> tuple[list[Any], None]:
    saved = (of["running_mean"], of["running_var"], of["save_mean"], of["save_var"])
    found = torch.ops.aten.native_batch_norm_backward(
        of["grad_output"], of["input"], of["weight"], *saved, True, of["epsilon"], [True, True, True]
    )
    return list(found), None


def _rms_norm(of: dict[str, Any]) -> tuple[list[Any], Kept | None]:
    def norm(source: Tensor, weight: Tensor | None = None) -> list[Tensor]:
        return [torch.rms_norm(source, of["normalized_shape"], weight, of["eps"])]

    return followed(norm, of["input"], *([] if of["weight"] is None else [of["weight"]]))


def _softmax(function: Callable[..., Tensor]) -> Forward:
    """With its result in single precision already, which only a GPU is asked for."""
    return lambda of: ([function(of["self"], of["dim"], False)], None)


def _softmax_gradient(function: Callable[..., Tensor]) -> Forward:
    return lambda of: ([function(of["grad_output"], of["output"], of["dim"], of["grad_output"].dtype)], None)


FAMILY = Family(
    members={
        "norm": "native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm batch_norm_elemt"
        " batch_norm_stats _native_batch_norm_legit _native_batch_norm_legit_functional"
        " _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update _fused_rms_norm rms_norm"
        " layer_norm miopen_batch_norm _softmax _log_softmax _masked_softmax _safe_softmax",
        "norm-backward": "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward"
        " cudnn_batch_norm_backward batch_norm_backward _fused_rms_norm_backward _softmax_backward_data"
        " _log_softmax_backward_data _masked_softmax_backward miopen_batch_norm_backward",
    },
    work={"norm": _work, "norm-backward": _work},
    needs={
        **dict.fromkeys(_OF_BATCHES, _of_batches),
        "_safe_softmax": _safe_softmax,
        "_softmax_backward_data": _softmax_backward,
    },
    copied={
        **dict.fromkeys(("native_layer_norm", "native_group_norm", *_SOFTMAX), contiguous(0)),
        **dict.fromkeys(("native_layer_norm_backward", "native_group_norm_backward"), contiguous(0, 1)),
        **dict.fromkeys((f"{name}_backward_data" for name in _SOFTMAX), contiguous(0)),
    },
    whole="_fused_rms_norm",
    forwards={
        "cudnn_batch_norm": _batch_norm,
        "cudnn_batch_norm_backward": _batch_norm_backward,
        "_fused_rms_norm": _rms_norm,
        **{name: _softmax(aten(name)) for name in _SOFTMAX},
        **{f"{name}_backward_data": _softmax_gradient(aten(f"{name}_backward_data")) for name in _SOFTMAX},
    },
    backwards={"_fused_rms_norm_backward": Gradient("rstd", ("grad_out",))},
)
