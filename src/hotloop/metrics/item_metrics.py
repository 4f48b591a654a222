"""The metrics: what each gives for the items of a batch."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hotloop.errors import BadArgument
from hotloop.objective.objectives import logits_of
from hotloop.printing.text import an

IGNORED = -100  # the label that PyTorch's cross entropy leaves out


def accuracy(given: Any, target: Tensor) -> Tensor:
    """Whether the largest of the classes, in dimension 1, is the target; labels of -100 are left out.

    One output per item is a logit of a binary target, as `BCEWithLogitsLoss` takes it, with a dimension of its own or
    without.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([ True, False])
    """
    return torch.masked_select(*_right(given, target))


def _right(given: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each output is right, and whether it counts: what `accuracy` selects, for which the host must wait."""
    output = _logits(given)
    is_logit = output.dim() == target.dim() + 1 > 1 and output.size(1) == 1  # of one class there is nothing to choose
    if is_logit:
        output = output.squeeze(1)
    if output.shape == target.shape:
        has_classes = not is_logit and output.dim() > 1 and output.size(1) > 1
        if has_classes and target.is_floating_point():  # their probabilities
            target = target.argmax(1)
        else:
            right = ((output > 0) == (target > 0.5)).flatten()
            return right, torch.ones_like(right)
    _check(output, target)
    return output.argmax(1) == target, target != IGNORED


accuracy.weighted = _right  # type: ignore[attr-defined]  # for training metrics, where nothing waits


def top_k(k: int) -> Callable[[Any, Tensor], Tensor]:
    """Whether the target is among the `k` largest classes: `metrics={"top5": hotloop.metrics.top_k(5)}`.

    >>> top_k(2)(torch.tensor([[0.1, 0.5, 0.4]]), torch.tensor([2]))
    tensor([True])
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise BadArgument(f"k={k!r}", fix="give a number of classes, from 1")

    def weighted(given: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        output = _logits(given)
        _check(output, target)
        largest = output.topk(min(k, output.size(1)), 1).indices
        return (largest == target.unsqueeze(1)).any(1), target != IGNORED

    def among(given: Any, target: Tensor) -> Tensor:
        return torch.masked_select(*weighted(given, target))

    among.weighted = weighted  # type: ignore[attr-defined]
    return among


def absolute_error(output: Tensor, target: Tensor) -> Tensor:
    """The distance of each number from its target; its mean is the MAE."""
    return (_alike(output, target) - target).abs().flatten()


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """The squared distance of each number from its target; its mean is the MSE."""
    return (_alike(output, target) - target).square().flatten()


def _logits(given: Any) -> Tensor:
    """The logits in what a model returned. Models that compute their own loss return None for it without targets."""
    found = given.get("logits") if isinstance(given, Mapping) else logits_of(given)
    if isinstance(found, list | tuple):
        several = [each for each in found if isinstance(each, Tensor) and each.dim() > 0]
        found = several[0] if len(several) == 1 else None
    if not isinstance(found, Tensor):
        raise BadArgument(
            f"the model returned {an(type(given).__name__)}, in which no logits were found",
            fix="write a metric that knows where they are: lambda output, target: accuracy(output[…], target)",
        )
    return found


def _alike(output: Tensor, target: Tensor) -> Tensor:
    if output.shape != target.shape:
        raise BadArgument(
            f"an output of shape {tuple(output.shape)} and a target of shape {tuple(target.shape)}",
            fix="give both one shape, as by output.squeeze(-1)",
        )
    return output


def _check(output: Tensor, target: Tensor) -> None:
    if output.dim() != target.dim() + 1 or output.shape[:1] + output.shape[2:] != target.shape:
        fix = "give (items, classes, …) and (items, …), as cross entropy takes them"
        if output.shape[:-1] == target.shape:  # as Hugging Face models of tokens give them
            fix = (
                "move the classes from the last dimension to dimension 1: lambda output, target:"
                " accuracy(output.movedim(-1, 1), target); of a language model, output[:, :-1] and target[:, 1:]"
            )
        raise BadArgument(
            f"an output of shape {tuple(output.shape)} is not the classes of a target of shape {tuple(target.shape)}",
            fix=fix,
        )
