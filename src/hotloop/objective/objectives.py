"""What is trained: a criterion, an objective function or a model that returns its own loss, all as one callable."""

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.errors import BadArgument, BatchError
from hotloop.memory.micro_batches import count_items
from hotloop.printing.text import an
from hotloop.values.tree import tensors_in

HALF_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
Criterion = Callable[[Any, Any], Tensor]
_POINTWISE = (nn.MSELoss, nn.L1Loss, nn.HuberLoss, nn.SmoothL1Loss)  # which broadcast with a warning at most
Predict = Callable[[nn.Module, Any], tuple[Any, Any]]
# `(model, batch) → loss`, a dict of named losses, or either with the number of items that it is the mean of.
Objective = Callable[[nn.Module, Any], Any]


@dataclass(slots=True)  # not frozen: one is made in every step, and freezing costs as much as an operation
class Losses:
    """The losses of one batch, or of a micro-batch."""

    parts: dict[str, Tensor]
    count: int | Tensor  # items, or what the objective said that they are the mean of
    is_counted: bool = False  # whether the objective said how many
    weight: int | float | Tensor | None = None  # what they are the mean over, where that is not `count`
    size: int | None = None  # about what the weight can be, for one that is on the device
    is_sum: bool = False  # they are sums, not means
    by_values: bool = False  # whether another batch of the same shapes may weigh something else
    first: float | None = None  # what the batch before should have weighed, which was counted as 1

    @property
    def total(self) -> Tensor:
        first, *rest = self.parts.values()
        return sum(rest, start=first) if rest else first

    @property
    def mass(self) -> int | float | Tensor:
        """What they weigh beside the losses of other micro-batches."""
        return self.count if self.weight is None else self.weight

    @property
    def unit(self) -> int | float:
        """A number of about the size of their weight, which the host knows."""
        known = self.size if self.size is not None else self.mass if not isinstance(self.mass, Tensor) else 1
        return known if known > 0 else 1

    def joined_with(self, other: "Losses") -> "Losses":
        """The losses of two micro-batches as one."""
        pairs = {name: (value, other.parts[name]) for name, value in self.parts.items()}
        if self.is_sum:
            parts = {name: a + b for name, (a, b) in pairs.items()}
        else:
            parts = {name: _mean(a, self.mass, b, other.mass) for name, (a, b) in pairs.items()}
        weight = None if self.weight is None and other.weight is None else self.mass + other.mass
        by_values = self.by_values or other.by_values
        return Losses(
            parts, self.count + other.count, self.is_counted, weight, self.size, self.is_sum, by_values, self.first
        )

    def detach_parts(self) -> None:
        """After the backward pass: the values stay, what they were computed from need not."""
        for name, value in self.parts.items():
            try:  # in place costs less than a new tensor; a weight that is its own loss goes on learning
                self.parts[name] = value.detach() if value.is_leaf else value.detach_()
            except RuntimeError:  # torch refuses that for a view
                self.parts[name] = value.detach()


def _mean(a: Tensor, count: int | float | Tensor, b: Tensor, other: int | float | Tensor) -> Tensor:
    """The mean of two means by their counts; the mean of nothing, which may be NaN, does not count."""
    if not isinstance(count, Tensor) and not isinstance(other, Tensor):
        return torch.lerp(a, b, other / (count + other)) if count and other else (a if count else b)
    count, other = (torch.as_tensor(each, device=a.device) for each in (count, other))
    share = torch.where(other > 0, other / (count + other), 0.0).to(a.dtype)
    return torch.lerp(torch.where(count > 0, a, b), torch.where(other > 0, b, a), share)


def losses_of(
    objective: Objective, model: nn.Module, batch: Any, name: str = "loss", items: int | None = None
) -> Losses:
    """Call an objective and make what it returns uniform."""
    return uniform(objective(model, batch), batch, name, items)


def uniform(returned: Any, batch: Any, name: str = "loss", items: int | None = None) -> Losses:
    """What an objective returned for a batch, of `items` where they are known, in whichever of the allowed forms."""
    items = items_in(batch) if items is None else items
    if isinstance(returned, Tensor) and returned.dim() == 0:  # most objectives
        return Losses({name: returned}, items)
    count: int | Tensor | None = None
    if isinstance(returned, tuple) and len(returned) == 2 and not isinstance(returned[1], Mapping):
        returned, count = returned
        if isinstance(count, Tensor) and count.numel() != 1:
            raise BadArgument(
                f"the objective returned a pair, and its second value, {_kind(count)}, is not the number of items"
                " that the loss is the mean of",
                fix="return the loss alone: return loss; `predict=` and `train_metrics=` are for outputs",
            )
    prefix = "" if name == "loss" else f"{name}/"
    parts = {prefix + key: v for key, v in returned.items()} if isinstance(returned, Mapping) else {name: returned}
    wrong = {key: value for key, value in parts.items() if not isinstance(value, Tensor) or value.numel() != 1}
    if wrong or not parts:
        shown = ", ".join(f"{key}: {_kind(value)}" for key, value in wrong.items()) or "nothing"
        raise BadArgument(
            f"the objective must return a loss of one number, and returned {shown}",
            fix="return loss.mean(), a dict of such losses, or (loss, number of items it is the mean of)",
        )
    if len(parts) > 1:
        _refuse_a_sum_beside_its_parts(returned)
    if count is None:
        return Losses(parts, items)
    size = None
    if isinstance(count, Tensor):  # about as many as it may count: labels or tokens, or items
        size = max([items_in(batch), *(t.numel() for _, t in tensors_in(batch) if not t.is_floating_point())])
    return Losses(parts, count, is_counted=True, size=size)


def _refuse_a_sum_beside_its_parts(returned: Mapping[str, Tensor]) -> None:
    others = [key for key, value in returned.items() if key != "loss" and value.requires_grad]
    if "loss" in returned and others:
        raise BadArgument(
            f"the objective returned 'loss' beside {', '.join(others)}, and all of them are added up: what 'loss' holds"
            " already would count twice",
            fix="return the parts without their sum, each with its weight: {'ce': ce, 'kl': 0.1 * kl}; or detach what"
            " is only to be shown",
        )


def as_objective(loss: Criterion | None, objective: Objective | None) -> Objective:
    """One objective from what a person hands in: a criterion, an objective, or neither."""
    if loss is not None and objective is not None:
        raise BadArgument(
            "both loss= and objective= were given", fix="give one: loss(output, target) or objective(model, batch)"
        )
    for name, given in (("loss", loss), ("objective", objective)):
        if isinstance(given, type) and issubclass(given, nn.Module):
            raise BadArgument(
                f"{name}={given.__name__} is a class", fix=f"create an instance: {name}={given.__name__}()"
            )
        if given is not None and not callable(given):
            raise BadArgument(
                f"{name}={given!r} cannot be called",
                fix="give loss=nn.CrossEntropyLoss() or another criterion, or objective=lambda model, batch: …",
            )
    if objective is not None:
        _check_arguments(objective)
        return objective
    if loss is None:
        return own_loss

    compare = compared(loss)

    def criterion(model: nn.Module, batch: Any) -> Tensor:
        if type(batch) in (list, tuple) and len(batch) == 2:  # most batches; asking what else it may be takes longer
            output = model(batch[0])
            return compare(output if type(output) is Tensor else logits_of(output), batch[1])
        output, target = predict(model, batch)
        return compare(logits_of(output), target)

    criterion.criterion = loss  # type: ignore[attr-defined]  # so that the loss can be watched without the model
    return criterion


def _check_arguments(objective: Objective) -> None:
    """Refuse an objective that cannot be called with a model and a batch."""
    try:
        inspect.signature(objective).bind(None, None)
    except TypeError as error:
        raise BadArgument(
            f"objective= is called with the model and the whole batch, and takes something else: {error}",
            fix="def objective(model, batch): x, y = batch; …",
        ) from None
    except ValueError:  # a function of an extension, which does not tell
        return


def compared(loss: Criterion) -> Criterion:
    """The same criterion; one that compares element by element refuses what only broadcasting brings together."""
    if not isinstance(loss, _POINTWISE):
        return loss

    def checked(output: Any, target: Any) -> Tensor:
        # A dimension of 1 that both have was put there to be broadcast.
        if type(output) is Tensor and type(target) is Tensor and output.ndim != target.ndim:
            _check_broadcast(output, target, type(loss).__name__)
        value: Tensor = loss(output, target)
        return value

    return checked


def _check_broadcast(output: Tensor, target: Tensor, name: str) -> None:
    """Refuse `(N, 1)` against `(N,)`, of which PyTorch makes `(N, N)`: each output is compared with every target."""
    try:
        both = torch.broadcast_shapes(output.shape, target.shape)
    except RuntimeError:
        return  # PyTorch refuses them too
    if math.prod(both) <= max(output.numel(), target.numel()):
        return  # one of them is a row or a number for all of the other
    larger, kind = (output, "output") if output.ndim > target.ndim else (target, "target")
    dim = max(n for n, length in enumerate(larger.shape) if length == 1) - larger.ndim
    raise BatchError(
        f"{name} was given an output of shape {tuple(output.shape)} and a target of shape {tuple(target.shape)};"
        f" PyTorch broadcasts them to {tuple(both)}, so that each output is compared with every target",
        fix="give both one shape: " + criterion_line(**{kind: f"{kind}.squeeze({dim})"}),
    )


def criterion_line(output: str = "output", target: str = "target") -> str:
    """The argument of `Loop` with which a criterion is given something else than output and target.

    >>> criterion_line(target="target.float()")
    'loss=lambda output, target: criterion(output, target.float())'
    """
    return f"loss=lambda output, target: criterion({output}, {target})"


def predict(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    """Output and target of a batch `(input, …, target)`, or of a dict with `labels`.

    >>> output, target = predict(nn.Identity(), (torch.zeros(1), torch.ones(1)))
    """
    if isinstance(batch, Mapping) and "labels" in batch:
        return model(**batch), batch["labels"]
    if isinstance(batch, list | tuple) and len(batch) >= 2:
        *inputs, target = batch
        return model(*inputs), target
    if batch is None:
        raise BadArgument(
            "a batch is None",
            fix="return the batch: a collate_fn, a device_transform or a generator without `return` or `yield` of one"
            " gives None; for a loss that needs no batch: Loop(…, objective=lambda model, batch: …)",
        )
    raise BadArgument(
        f"a batch that is {_kind(batch)} is not (input, …, target), nor a dict with 'labels'",
        fix="say how to use it: Loop(…, objective=lambda model, batch: …) for training, predict=lambda model, batch:"
        " (output, target) in fit and evaluate for metrics; a loader gives whole batches: DataLoader(TensorDataset(x,"
        " y), batch_size=32), or [(x, y)] for a single one",
    )


def logits_of(output: Any) -> Any:
    """The logits of an output that has them besides other things, as those of Hugging Face do; else the output."""
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def items_in(batch: Any) -> int:
    """Number of items: the first size that the tensors have in common.

    >>> items_in({"x": torch.zeros(8, 3)})
    8
    """
    if type(batch) in (list, tuple) and batch:  # most batches; the search below costs more
        first, last = batch[0], batch[-1]
        if type(first) is Tensor and type(last) is Tensor:
            rows, others = first.shape, last.shape
            if rows and others and rows[0] == others[0]:
                return rows[0]
    return count_items(batch)


def shapes_in(batch: Any) -> tuple[torch.Size, ...]:
    """The shapes of all tensors of a batch, in their order.

    >>> shapes_in({"x": torch.zeros(8, 3), "y": torch.zeros(8)})
    (torch.Size([8, 3]), torch.Size([8]))
    """
    if type(batch) in (list, tuple) and {*map(type, batch)} == {Tensor}:  # most batches; the search below costs more
        return tuple([tensor.shape for tensor in batch])
    return tuple(tensor.shape for _, tensor in tensors_in(batch))


def averages(loss: Criterion | None) -> bool:
    """Whether a criterion gives the mean over its items; one with `reduction="sum"` gives the sum."""
    return getattr(loss, "reduction", "mean") != "sum"


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The context in which a forward pass runs at `precision`; fp32 needs none."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=HALF_PRECISIONS[precision])


def own_loss(model: nn.Module, batch: Any, keep: Callable[[Any], object] | None = None) -> Tensor:
    """For models that compute their loss: `model(**batch)`, `model(*batch)` or `model(batch)`, whichever they take.

    They may return the loss, something with `.loss` or `["loss"]`, or a tuple in which it is the only single number.
    `keep` is given all that they return.
    """
    if isinstance(batch, Mapping):
        call, output = "model(**batch)", model(**batch)
    elif type(batch) in (list, tuple) and _takes_each(type(model), len(batch)):  # type: ignore[arg-type]
        call, output = "model(*batch)", model(*batch)
    else:
        call, output = "model(batch)", model(batch)
    if keep is not None:
        keep(output)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Tensor):
        loss = output
    elif loss is None and isinstance(output, tuple):
        evaluates = not torch.is_grad_enabled()  # then no output requires a gradient, and the loss is told by its shape
        single = [t for t in output if isinstance(t, Tensor) and t.numel() == 1 and (evaluates or t.requires_grad)]
        single = [t for t in single if t.dim() == 0] or single  # a batch of one item may have an output of one number
        loss = single[0] if len(single) == 1 else None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        if loss is None and isinstance(batch, Mapping) and "labels" not in batch and hasattr(output, "loss"):
            raise BadArgument(
                f"{type(model).__name__} returned no loss: it computes one if the batch has the targets, and this"
                f" one has {', '.join(map(str, batch))}",
                fix='add them under the name that its forward has, mostly "labels" (for CLIP: "return_loss": True), in'
                " the dataset or in collate_fn; or say what the loss is: objective=lambda model, batch: …",
            )
        raise BadArgument(
            f"{type(model).__name__} was called as {call} and returned {_kind(output)}, in which no loss was found",
            fix="give loss=nn.CrossEntropyLoss() or another criterion, or say where the loss is:"
            f" objective=lambda model, batch: {call}[…]",
        )
    return loss


@cache
def _takes_each(kind: Any, count: int) -> bool:
    """Whether the forward of such models takes so many arguments, each by its place."""
    try:
        inspect.signature(kind.forward).bind(None, *range(count))
    except (TypeError, ValueError):
        return False
    return True


def _kind(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else an(type(value).__name__)
