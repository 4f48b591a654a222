"""What a loss is the mean over, read while it is computed: items, elements, targets that are not ignored, a mask."""

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import isclose, prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hotloop._torch import compiler_is_loaded

Count = int | float | Tensor
Kind = Literal["mean", "sum", "constant", "unknown"]
NEGLIGIBLE = 1e-3  # what is added to a count to keep it from 0


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """How a number was made of a batch."""

    kind: Kind
    count: Count = 0  # a mean: what it is the mean over
    size: int = 0  # elements that it was made of: the most that `count` can be, unless they have weights
    by_values: bool = False  # whether labels, weights or masks decide the count, and not shapes alone
    classes: bool = False  # whether one loss over classes alone decides it
    number: float | None = None  # a constant: its value, where it is known
    bare: Tensor | None = None  # a sum that a guard against 0 was put on: what it was before


UNKNOWN = Reduction("unknown")
CONSTANT = Reduction("constant")


def total_of(reductions: Iterable[Reduction]) -> Reduction:
    """The reduction of a sum of losses, as a dict of named ones is."""
    first, *rest = reductions
    for each in rest:
        first = _added(first, each)
    return first


class Classes(TorchFunctionMode):
    """Counts the targets of the losses over classes that are called inside; small enough for the compiler to trace.

    `guards`: a loss all of whose targets are ignored is 0 inside, with a gradient of 0, instead of 0/0.
    """

    def __init__(self, *, guards: bool = True) -> None:
        super().__init__()
        self.count: Tensor | None = None
        self._guards = guards

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy or func is F.nll_loss:
            count = class_count(*args, **kwargs)
            if count is not None:
                self.count = count
                return _guarded_loss(func, count, args, kwargs) if self._guards else func(*args, **kwargs)
        return func(*args, **kwargs)


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


def _guarded_loss(func: Any, count: Tensor, args: Any, kwargs: Any) -> Tensor:
    """A mean over classes that is 0 where nothing counts."""
    if (smooth := _smoothed(*args, **kwargs)) is not None:  # its gradient would be 0/0 too: the sum is divided by hand
        return smooth / torch.where(count == 0, 1, count)
    loss: Tensor = func(*args, **kwargs)
    return torch.where(count == 0, 0.0, loss)  # the gradient of ignored targets is 0 in any case


def _smoothed(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """The sum of a loss with smooth labels; None where they are not smooth."""
    if not label_smoothing:
        return None
    exact = input if input.dtype in (torch.float32, torch.float64) else input.float()  # a sum may be too large for fp16
    return F.cross_entropy(
        exact, target, weight, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )


class ReductionMode(TorchFunctionMode):
    """Follows losses and the arithmetic after them; `of` tells how a number was made.

    `guards`: the mean of nothing, which is 0/0, is 0 inside, with a gradient of 0. Nothing waits for the device.
    """

    def __init__(self, items: int, *, guards: bool = False) -> None:
        super().__init__()
        self._items, self._guards = items, guards
        self._known: dict[int, tuple[Tensor, Reduction]] = {}  # numbers, and rows of them
        self._constants: dict[int, weakref.ref[Tensor]] = {}  # larger tensors that are made of weights alone
        self._shares: dict[int, tuple[weakref.ref[Tensor], Reduction]] = {}  # tensors divided by a count, and by which
        self._read: list[float] = []  # counts that were read into Python
        self._by_values = False  # whether values have decided the shape of something

    def forget(self) -> None:
        """Free the tensors, which keep their autograd graph alive."""
        self._known.clear()
        self._constants.clear()
        self._shares.clear()

    def of(self, value: Any) -> Reduction:
        """How a loss was made."""
        if isinstance(value, int | float):
            return Reduction("constant", number=float(value))
        known = self._known.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        if isinstance(value, nn.Parameter) or self._is_constant(value):
            return CONSTANT
        if isinstance(value, Tensor) and not value.dim() and value.grad_fn is None:
            return CONSTANT  # it was there before: a temperature, a buffer
        return UNKNOWN

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        follow = _FOLLOWED.get(name)
        if follow is not None:
            return follow(self, func, args, kwargs)
        result = func(*args, **kwargs)
        if name in _LOSSES and not (type(result) is Tensor and result.dim()):  # with "none" they reduce nothing
            self._keep(result, _reduction_of_loss(func, name, args, kwargs, self._by_values))
        elif type(result) is Tensor:
            self._note(result, args)
        return result

    def _note(self, result: Tensor, args: Sequence[Any]) -> None:
        """The result of an operation that is not followed: made of constants alone, or unknown."""
        constant = bool(args) and all(map(self._is_constant_argument, args))
        if not result.dim():
            self._keep(result, CONSTANT if constant else UNKNOWN)
        elif constant:
            self._constants[id(result)] = weakref.ref(result)

    def _keep(self, value: Any, reduction: Reduction) -> None:
        if isinstance(value, Tensor):
            self._known[id(value)] = (value, reduction)

    def _is_constant(self, value: Any) -> bool:
        if isinstance(value, nn.Parameter):
            return True
        ref = self._constants.get(id(value))
        if ref is not None and ref() is value:
            return True
        known = self._known.get(id(value))
        return known is not None and known[0] is value and known[1].kind == "constant"

    def _is_constant_argument(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return self._is_constant(value)
        if isinstance(value, list | tuple):
            return all(map(self._is_constant_argument, value))
        return True

    def _share_of(self, value: Any) -> Reduction | None:
        share = self._shares.get(id(value))
        return share[1] if share is not None and share[0]() is value else None

    # What is followed. Each runs the operation and keeps what its result means.

    def _class_loss(self, func: Any, args: Any, kwargs: Any) -> Any:
        count = class_count(*args, **kwargs)
        if count is None:
            result = func(*args, **kwargs)
            if not result.dim():  # with "none" it reduces nothing
                self._keep(result, _reduction_of_classes(func, args, kwargs))
            return result
        result = _guarded_loss(func, count, args, kwargs) if self._guards else func(*args, **kwargs)
        target = _arguments(func, args, kwargs)["target"]
        self._keep(result, Reduction("mean", count, max(target.numel(), 1), by_values=True, classes=True))
        return result

    def _sum(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self._reduced(func, args, kwargs, "sum")

    def _mean(self, func: Any, args: Any, kwargs: Any) -> Any:
        value = args[0] if args else kwargs.get("input")
        if self._guards and isinstance(value, Tensor) and not value.numel() and len(args) + len(kwargs) == 1:
            return self._reduced(torch.sum, (value,), {}, "mean")  # which is 0, and not 0/0
        return self._reduced(func, args, kwargs, "mean")

    def _reduced(self, func: Any, args: Any, kwargs: Any, kind: Literal["mean", "sum"]) -> Any:
        result = func(*args, **kwargs)
        value = args[0] if args else kwargs.get("input")
        if not isinstance(result, Tensor) or result.dim() or not isinstance(value, Tensor):
            if isinstance(result, Tensor) and self._is_constant(value):
                self._constants[id(result)] = weakref.ref(result)
            return result
        inner = self._known.get(id(value))
        share = self._share_of(value)
        if self._is_constant(value):
            self._keep(result, CONSTANT)
        elif inner is not None and inner[0] is value:
            self._keep(result, inner[1])  # a row of losses, or one alone
        elif share is not None and kind == "sum":
            self._keep(result, share)
        elif not value.dim():
            self._keep(result, self.of(value))
        elif kind == "sum":
            self._keep(result, Reduction("sum", size=value.numel()))
        else:
            self._keep(result, Reduction("mean", value.numel(), value.numel(), by_values=self._by_values))
        return result

    def _dot(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if type(result) is Tensor and result.dim() == 0 and len(args) == 2:
            share = self._share_of(args[0]) or self._share_of(args[1])
            self._keep(result, share or Reduction("sum", size=args[0].numel()))
        elif type(result) is Tensor:
            self._note(result, args)
        return result

    def _same(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What changes nothing in the meaning of a number."""
        result = func(*args, **kwargs)
        if args and type(result) is Tensor and result is not args[0]:
            if not result.dim():
                self._keep(result, self.of(args[0]))
            elif self._is_constant(args[0]):
                self._constants[id(result)] = weakref.ref(result)
            elif (share := self._share_of(args[0])) is not None:
                self._shares[id(result)] = (weakref.ref(result), share)
        return result

    def _add(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if type(result) is not Tensor or len(args) < 2:
            return result
        if not result.dim():
            self._keep(result, _added(self.of(args[0]), self.of(args[1]), args[0]))
        else:
            self._note(result, args)
        return result

    def _multiply(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if type(result) is not Tensor or len(args) < 2:
            return result
        if not result.dim():
            self._keep(result, self._scaled(*args[:2]))
            return result
        share = self._share_of(args[0]) or self._share_of(args[1])
        if share is not None:
            self._shares[id(result)] = (weakref.ref(result), share)
        else:
            self._note(result, args)
        return result

    def _scaled(self, a: Any, b: Any) -> Reduction:
        first, second = self.of(a), self.of(b)
        if first.kind == "constant":
            first, second = second, first
        if second.kind != "constant":
            return UNKNOWN
        if first.kind == "sum" and second.number:
            return self._over(first, 1 / second.number)
        return replace(first, number=None) if first.kind == "constant" else first

    def _divide(self, func: Any, args: Any, kwargs: Any) -> Any:  # noqa: PLR0912  # one case for each pair of meanings
        if len(args) != 2 or kwargs:
            result = func(*args, **kwargs)
            if type(result) is Tensor:
                self._note(result, args)
            return result
        a, b = args if "rtruediv" not in func.__name__ and "rdiv" not in func.__name__ else args[::-1]
        above = self.of(a) if isinstance(a, Tensor) and not a.dim() else None
        below = self.of(b) if not isinstance(b, Tensor) or not b.dim() else UNKNOWN
        counts = isinstance(b, Tensor) and _counts(b, below)
        if counts and self._guards and a is args[0] and (above is None or above.kind in ("sum", "mean")):
            result = func(a, torch.where(b == 0, 1, b))
        else:
            result = func(*args)
        if type(result) is not Tensor:
            return result
        if result.dim():
            if counts and above is None:
                self._shares[id(result)] = (weakref.ref(result), _over_count(b, below))
            elif (share := self._share_of(a)) is not None and below.kind == "constant":
                self._shares[id(result)] = (weakref.ref(result), share)
            else:
                self._note(result, args)
        elif above is None:
            self._keep(result, UNKNOWN)
        elif below.kind == "constant":
            scaled = self._over(above, below.number) if above.kind == "sum" and below.number else above
            self._keep(result, replace(scaled, number=None) if scaled.kind == "constant" else scaled)
        elif counts and above.kind == below.kind == "sum":
            self._keep(result, _over_count(b, below))
        elif counts and above.kind == below.kind == "mean" and above.count is not b and above.size == below.size:
            self._keep(result, _over_count(b * below.size, below))
        else:
            self._keep(result, UNKNOWN)
        return result

    def _over(self, total: Reduction, number: float) -> Reduction:
        """A sum divided by a number: a mean where that is a count, else a sum all the same."""
        for read in self._read:
            if number == max(read, 1):
                return Reduction("mean", read, max(total.size, 1), by_values=True)
        whole = round(number)
        fits = whole >= 1 and isclose(number, whole, rel_tol=1e-6)
        if fits and whole % max(self._items, 1) == 0 and total.size % whole == 0:
            return Reduction("mean", whole, whole, by_values=self._by_values)
        return total

    def _guard(self, func: Any, args: Any, kwargs: Any) -> Any:
        """`clamp` and its like, which keep a count from 0."""
        result = func(*args, **kwargs)
        if type(result) is Tensor and args:
            reduction = self.of(args[0])
            if not result.dim() and reduction.kind == "sum" and not args[0].requires_grad:
                bare = args[0] if reduction.bare is None else reduction.bare
                self._keep(result, replace(reduction, bare=bare))
            else:
                self._note(result, args)
        return result

    def _stack(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        parts = args[0] if args else ()
        small = isinstance(parts, list | tuple) and all(isinstance(p, Tensor) and p.numel() == 1 for p in parts)
        if parts and small:
            self._keep(result, total_of(map(self.of, parts)))
        elif type(result) is Tensor:
            self._note(result, args)
        return result

    def _number(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A number that becomes a tensor."""
        result = func(*args, **kwargs)
        if type(result) is Tensor and not result.dim():
            numbers = {"zeros": 0.0, "ones": 1.0, "new_zeros": 0.0, "zeros_like": 0.0}
            value = args[0] if args and isinstance(args[0], int | float) else None
            number = numbers.get(func.__name__, value)
            self._keep(result, Reduction("constant", number=None if number is None else float(number)))
        return result

    def _to_python(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if isinstance(result, int | float) and self.of(args[0]).kind == "sum":
            self._read.append(float(result))
        return result

    def _index(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        index = args[1] if len(args) > 1 else None
        for each in index if isinstance(index, tuple) else (index,):
            if isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8):
                self._by_values = True
        if type(result) is Tensor:
            inner = self._known.get(id(args[0]))
            if inner is not None and inner[0] is args[0]:
                self._keep(result, inner[1])
            else:
                self._note(result, args[:1])
        return result

    def _shape_by_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._by_values = True
        return func(*args, **kwargs)


def _counts(value: Tensor, reduction: Reduction) -> bool:
    """Whether a number may be what something is the mean over: a sum of a mask or of weights that nothing is learnt by.

    One that is learnt by, as in a Dice loss, has a gradient of its own, which no weight makes up for.
    """
    return reduction.kind in ("sum", "mean") and not value.requires_grad


def _over_count(value: Tensor, reduction: Reduction) -> Reduction:
    count = value if reduction.bare is None else reduction.bare
    return Reduction("mean", count, max(reduction.size, 1), by_values=True)


def _added(a: Reduction, b: Reduction, value: Any = None) -> Reduction:
    """The reduction of a sum, or of a difference, of two numbers."""
    if a.kind == "constant":
        a, b = b, a
    if a.kind == "constant":
        return CONSTANT
    if "unknown" in (a.kind, b.kind):
        return UNKNOWN
    if b.kind == "constant":
        if a.kind == "mean" or b.number == 0:
            return a
        guard = b.number is not None and abs(b.number) <= NEGLIGIBLE
        if guard and isinstance(value, Tensor) and not value.requires_grad:
            return replace(a, bare=value if a.bare is None else a.bare)
        return UNKNOWN
    if a.kind != b.kind:
        return UNKNOWN
    if a.kind == "sum":
        return Reduction("sum", size=a.size + b.size)
    if a.by_values != b.by_values:  # the one that values decide: the comparison with the whole tells if that is wrong
        return replace(a if a.by_values else b)
    if a.count is b.count or not a.by_values:
        return a
    return replace(a, classes=False)


def _reduction_of_classes(func: Any, args: Any, kwargs: Any) -> Reduction:
    """A loss over classes that is no mean over targets which are numbers of classes."""
    given = _arguments(func, args, kwargs)
    size, target = given["input"], given["target"]
    if given["size_average"] is not None or given["reduce"] is not None:
        return UNKNOWN
    if given["reduction"] == "sum":
        return Reduction("sum", size=target.numel())
    if given["reduction"] != "mean":
        return UNKNOWN
    classes = size.size(1) if size.dim() > 1 else size.size(0)  # the targets are probabilities
    count = max(size.numel() // max(classes, 1), 1)
    return Reduction("mean", count, count)


_ELEMENTS = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "poisson_nll_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "kl_div",
)
_NORMALISED = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")  # whose weights are divided by
_ROWS = {  # losses with one value for each item → their first argument
    "cosine_embedding_loss": "input1",
    "margin_ranking_loss": "input1",
    "triplet_margin_loss": "anchor",
    "triplet_margin_with_distance_loss": "anchor",
    "multi_margin_loss": "input",
    "multilabel_margin_loss": "input",
    "multilabel_soft_margin_loss": "input",
}
_LOSSES = {*_ELEMENTS, *_ROWS, "ctc_loss"}


def _reduction_of_loss(func: Any, name: str, args: Any, kwargs: Any, by_values: bool) -> Reduction:
    given = _arguments(func, args, kwargs)
    how = given.get("reduction")
    if given.get("size_average") is not None or given.get("reduce") is not None or how not in _HOW:
        return UNKNOWN
    size = _size_of(name, given)
    if size is None:
        return UNKNOWN
    if how == "sum":
        return Reduction("sum", size=size)
    if how == "batchmean":
        size = max(given["input"].size(0), 1)
    elif name in _NORMALISED and isinstance(weight := given.get("weight"), Tensor):
        return Reduction("mean", weight.sum(), size, by_values=True)
    return Reduction("mean", size, size, by_values=by_values)


_HOW = ("mean", "sum", "batchmean")


def _size_of(name: str, given: Mapping[str, Any]) -> int | None:
    """How many values a loss is the mean of."""
    if name == "ctc_loss":
        lengths = given["target_lengths"]
        return max(lengths.numel() if isinstance(lengths, Tensor) else len(lengths), 1)
    if name in _ROWS:
        first = given[_ROWS[name]]
        return max(first.size(0) if first.dim() > 1 or (name == "margin_ranking_loss" and first.dim()) else 1, 1)
    try:
        size: int = prod(torch.broadcast_shapes(given["input"].shape, given["target"].shape))
    except RuntimeError:
        return None
    return max(size, 1)


@cache
def _signature(func: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(func)


def _arguments(func: Any, args: Any, kwargs: Any) -> Mapping[str, Any]:
    try:
        bound = _signature(func).bind(*args, **kwargs)
    except (TypeError, ValueError):  # a builtin
        return {"input": None, "target": None, "reduction": None, "size_average": None, "reduce": None}
    bound.apply_defaults()
    return bound.arguments


def _table(method: Callable[..., Any], names: str) -> dict[str, Callable[..., Any]]:
    return dict.fromkeys(names.split(), method)


_FOLLOWED: dict[str, Callable[[ReductionMode, Any, Any, Any], Any]] = {
    **_table(ReductionMode._class_loss, "cross_entropy nll_loss"),
    **_table(ReductionMode._sum, "sum"),
    **_table(ReductionMode._mean, "mean"),
    **_table(ReductionMode._dot, "dot vdot inner matmul __matmul__ __rmatmul__ mm"),
    **_table(ReductionMode._add, "add sub __add__ __radd__ __sub__ __rsub__ __iadd__ __isub__ add_ sub_ rsub subtract"),
    **_table(ReductionMode._multiply, "mul multiply __mul__ __rmul__ __imul__ mul_"),
    **_table(
        ReductionMode._divide, "div divide true_divide __truediv__ __rtruediv__ __rdiv__ __itruediv__ div_ __div__"
    ),
    **_table(ReductionMode._guard, "clamp clamp_min clamp_ clamp_min_ clip maximum max"),
    **_table(ReductionMode._stack, "stack cat hstack"),
    **_table(ReductionMode._number, "tensor as_tensor full zeros ones new_zeros new_tensor zeros_like scalar_tensor"),
    **_table(ReductionMode._to_python, "item __int__ __float__ __index__"),
    **_table(ReductionMode._index, "__getitem__"),
    **_table(
        ReductionMode._shape_by_values, "nonzero masked_select unique unique_consecutive argwhere repeat_interleave"
    ),
    **_table(
        ReductionMode._same,
        "neg __neg__ negative clone contiguous view reshape squeeze unsqueeze flatten float double half bfloat16 to"
        " type type_as cuda cpu detach nan_to_num alias requires_grad_ expand long int bool",
    ),
}


@contextmanager
def eager() -> Iterator[None]:
    """What the person has compiled runs as it was written: the compiler does not trace a `ReductionMode`."""
    if not compiler_is_loaded():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
