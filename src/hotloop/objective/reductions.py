"""What a loss may be the mean over, noted while it is computed: targets that count, elements, what it is divided by."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hotloop._torch import compiler_is_loaded

Number = int | float | Tensor
NEGLIGIBLE = 1e-3  # what is added to a count to keep it from 0


@dataclass(frozen=True, slots=True, eq=False)
class Denominator:
    """What a loss, or a part of it, may be the mean over."""

    value: Number
    by_values: bool = True  # whether labels, weights or masks decide it, and not shapes alone
    size: int = 0  # the most that a count of targets can be


class ClassCounts(TorchFunctionMode):
    """Counts the targets of the losses over classes that are called inside; small enough for the compiler to trace."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counted = _class_loss(func, args, kwargs or {})
        if counted is None:
            return func(*args, **(kwargs or {}))
        loss, self.count = counted
        return loss

    def value_at(self, place: int) -> Tensor | None:
        return self.count


def class_count(
    input: Tensor,  # noqa: A002  # the names of `F.cross_entropy`
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The weight of the targets that a mean over classes counts; None where that is not what is asked for."""
    if reduction != "mean" or size_average is not None or reduce is not None or target.is_floating_point():
        return None
    valid = target != ignore_index
    if weight is None:
        return valid.sum()
    each = weight.index_select(0, torch.where(valid, target, 0).flatten())
    return torch.where(valid.flatten(), each, 0.0).sum()


def _class_loss(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor] | None:
    """A mean over classes and its count; where nothing counts it is 0, with a gradient of 0, instead of 0/0."""
    count = class_count(*args, **kwargs) if func is F.cross_entropy or func is F.nll_loss else None
    if count is None:
        return None
    if kwargs.get("label_smoothing"):  # its gradient would be 0/0 too: the sum is divided by hand
        logits, *rest = args or (kwargs.pop("input"),)
        exact = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()  # a sum may be large
        return func(exact, *rest, **{**kwargs, "reduction": "sum"}) / torch.where(count == 0, 1, count), count
    return torch.where(count == 0, 0.0, func(*args, **kwargs)), count  # ignored targets have no gradient in any case


class Denominators(TorchFunctionMode):
    """Notes what the losses that are computed inside may be means over: candidates, of which a comparison chooses.

    The mean of nothing, which is 0/0, is 0 inside, with a gradient of 0. Nothing waits for the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[Denominator] = []
        # By their ids, and with themselves, so that no other tensor gets the id.
        self._losses: dict[int, tuple[Tensor, int]] = {}  # PyTorch's → the place of its count
        self._bare: dict[int, tuple[Tensor, Tensor | None]] = {}  # counts with a guard → without; None: no count
        self._read: list[float] = []  # numbers that were read into Python
        self._by_values = False  # whether values have decided the shape of something

    def forget(self) -> None:
        """Free the losses, which keep their autograd graph alive."""
        self._losses.clear()

    def place_of(self, loss: Any) -> int | None:
        """The place of the count of a mean that is PyTorch's own; None for any other loss."""
        return self._losses.get(id(loss), (loss, None))[1]

    def value_at(self, place: int) -> Number | None:
        """The count at a place; None where the objective returned before it came to it."""
        return self.counts[place].value if place < len(self.counts) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if (note := _NOTED.get(name)) is not None:
            return note(self, func, args, kwargs)
        self._by_values |= name in _SELECTIONS or (name == "__getitem__" and _has_mask(args[1]))
        result = func(*args, **kwargs)
        if name in _READS and isinstance(result, int | float):
            self._read.append(float(result))
        return result

    def _note(self, count: Number, *, by_values: bool = True, size: int = 0, of: Any = None) -> None:
        self.counts.append(Denominator(count, by_values, size))
        if of is not None:
            self._losses[id(of)] = (of, len(self.counts) - 1)

    def _loss(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = _signature(func).bind(*args, **kwargs).arguments
        if (counted := _class_loss(func, args, kwargs)) is not None:
            result, count = counted
            self._note(count, size=max(given["target"].numel(), 1), of=result)
            return result
        result = func(*args, **kwargs)
        how = given.get("reduction", "mean")
        is_legacy = any(given.get(name) is not None for name in ("size_average", "reduce"))
        if isinstance(result, Tensor) and not result.dim() and how != "sum" and not is_legacy:
            size = len(given["input"]) if how == "batchmean" else _SIZES[func.__name__](given)
            self._note(size, by_values=self._by_values or isinstance(size, Tensor), of=result)
        return result

    def _mean(self, func: Any, args: Any, kwargs: Any) -> Any:
        value = args[0] if args else kwargs.get("input")
        is_whole = isinstance(value, Tensor) and len(args) + len(kwargs) == 1
        result = torch.sum(value) if is_whole and not value.numel() else func(*args, **kwargs)
        if is_whole and not value.dim() and (place := self.place_of(value)) is not None:
            self._losses[id(result)] = (result, place)
        elif is_whole and value.dim():  # over values that a mask has picked it is as known as a loss of PyTorch's
            self._note(value.numel(), by_values=self._by_values, of=result if self._by_values else None)
            self._bare[id(result)] = (result, result.detach() * value.numel())  # as a divisor it stands for the sum
        return result

    def _divide(self, func: Any, args: Any, kwargs: Any) -> Any:
        if len(args) != 2 or kwargs:
            return func(*args, **kwargs)
        above, below = args[::-1] if func.__name__ in ("__rtruediv__", "__rdiv__") else args
        if not isinstance(below, Tensor):
            read = next((number for number in self._read if below == max(number, 1)), None)
            self._note(below if read is None else read, by_values=read is not None)
            return func(*args, **kwargs)
        if not _is_count(below):
            return func(*args, **kwargs)
        _, bare = self._bare.get(id(below), (below, below))
        self._note(torch.nan if bare is None else bare.detach().reshape(()))
        if above is args[0]:
            return func(above, torch.where(below == 0, 1, below))
        return func(*args)

    def _guard(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What keeps a count from 0: `clamp` to 1 at most, a tiny addend. A larger one makes it something else."""
        value: Any = args[0] if args else None
        if id(value) not in self._bare and not _is_count(value):
            return func(*args, **kwargs)
        name = func.__name__
        _, bare = self._bare.get(id(value)) or (value, value.clone() if name in _IN_PLACE else value)
        result = func(*args, **kwargs)
        numbers = [abs(n) for n in (*args[1:], *kwargs.values()) if isinstance(n, int | float)]
        if type(result) is Tensor and ("add" not in name or (numbers and numbers[0] <= NEGLIGIBLE)):
            self._bare[id(result)] = (result, None if max(numbers, default=1) > 1 else bare)
        return result


@cache
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _is_count(value: object) -> bool:
    """Whether it is a number without a gradient."""
    return isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad and not value.is_complex()


def _elements(given: Mapping[str, Any]) -> int:
    first, second = list(given.values())[:2]
    return prod(torch.broadcast_shapes(first.shape, second.shape))


def _weights(given: Mapping[str, Any]) -> Number:
    """What a loss divides by that is given weights; its elements, where it is not."""
    weight: Tensor | None = given.get("weight")
    return _elements(given) if weight is None else weight.sum()


def _rows(given: Mapping[str, Any]) -> int:
    first: Tensor = next(iter(given.values()))
    return len(first) if first.dim() > 1 else 1


def _places(given: Mapping[str, Any]) -> int:
    """Of a loss over classes whose targets are probabilities."""
    logits: Tensor = given["input"]
    return logits.numel() // max(logits.size(min(1, logits.dim() - 1)), 1)


_SIZES: dict[str, Callable[[Mapping[str, Any]], Number]] = {  # what PyTorch's losses are means over
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), _weights),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"), _elements),
    **dict.fromkeys(("poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss"), _elements),
    **dict.fromkeys(("hinge_embedding_loss", "margin_ranking_loss"), _elements),
    **dict.fromkeys(("multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss"), _rows),
    **dict.fromkeys(("cosine_embedding_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss"), _rows),
    **dict.fromkeys(("cross_entropy", "nll_loss"), _places),
    "ctc_loss": lambda given: len(given["target_lengths"]),
}
_DIVISIONS = ("div", "divide", "true_divide", "__truediv__", "__rtruediv__", "__rdiv__", "__itruediv__", "div_")
_GUARDS = ("clamp", "clamp_min", "clip", "maximum", "max", "add", "__add__", "__radd__", "detach")
_IN_PLACE = ("clamp_", "clamp_min_", "clip_")
_NOTED: dict[str, Callable[[Denominators, Any, Any, Any], Any]] = {
    "mean": Denominators._mean,
    **dict.fromkeys(_SIZES, Denominators._loss),
    **dict.fromkeys(_DIVISIONS, Denominators._divide),
    **dict.fromkeys((*_GUARDS, *_IN_PLACE), Denominators._guard),
}
_READS = {"item", "__int__", "__float__", "__index__"}
_SELECTIONS = {"nonzero", "masked_select", "unique", "unique_consecutive", "argwhere", "repeat_interleave", "tolist"}


def eager() -> AbstractContextManager[Any]:
    """What the person has compiled runs as it was written: the compiler does not trace `Denominators`."""
    return torch.compiler.set_stance("force_eager") if compiler_is_loaded() else nullcontext()
