"""Losses: those that are reductions, those that look up a number for each label, and CTC."""

from typing import Any

import torch
from torch import Tensor

from hotloop.apps.simulate._torch import is_simulated
from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import Operation
from hotloop.apps.simulate.families.base import POINTWISE, Family, Kind, moving
from hotloop.apps.simulate.library_memory import Constants
from hotloop.apps.simulate.need import Need, together
from hotloop.apps.simulate.products import Tf32, WorkPart, bytes_of
from hotloop.apps.simulate.replaced import Patches

_LABELS = ("nll_loss_forward", "nll_loss2d_forward")
_LABELS_BACKWARD = ("nll_loss_backward", "nll_loss2d_backward")
_LENGTHS = {"targets", "input_lengths", "target_lengths"}


def _of_labels(operation: Operation, kind: Kind, _tf32: Tf32) -> tuple[WorkPart, ...]:
    """A number is read for each label, or written into zeros."""
    written = bytes_of(operation.outputs)
    variant = "added" if operation.arguments.get("accumulate") else "loss"
    if kind.family == "scatter":
        return moving(operation, kind, 2.0 * written, 2, variant=variant)
    return moving(operation, kind, 2.0 * bytes_of(operation.inputs[1:]) + written, variant=variant)


def _binary_cross_entropy(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """Its two terms, of which one becomes the result where the losses are asked for one by one."""
    x = operation.inputs[0]
    mean = bool(operation.outputs) and operation.outputs[0].numel < x.numel
    return together([Need(x.nbytes, "terms of a loss")] * (2 if mean else 1))


def _install(patches: Patches, _capability: tuple[int, int]) -> None:
    """`ctc_loss` brings lengths to the host; for tensors without data PyTorch would leave that out."""
    original = torch.ctc_loss

    def loss(log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, *rest: Any, **named: Any) -> Any:
        if is_simulated(log_probs):
            inputs, lengths = (each.tolist() if isinstance(each, Tensor) else each for each in (inputs, lengths))
        return original(log_probs, targets, inputs, lengths, *rest, **named)

    patches.set(torch, "ctc_loss", loss)


FAMILY = Family(
    members={
        "reduction": "binary_cross_entropy mse_loss smooth_l1_loss huber_loss",
        "gather": " ".join(_LABELS),
        "scatter": " ".join(_LABELS_BACKWARD),
        POINTWISE: "mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward"
        " binary_cross_entropy_with_logits soft_margin_loss l1_loss",
    },
    apart=dict.fromkeys((*_LABELS, *_LABELS_BACKWARD), _of_labels),
    needs={"binary_cross_entropy_with_logits": _binary_cross_entropy},
    host={"_ctc_loss": _LENGTHS, "_ctc_loss_backward": _LENGTHS},
    install=_install,
)
