"""What a checkpoint claims, checked before anything changes: a file may be damaged, or come from anywhere.

A part is compared with what this run would save itself: the same names, the same kinds of values, the same shapes.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hotloop._torch import metadata_of
from hotloop.checkpoint.damage import unusable
from hotloop.errors import BadArgument, HotloopError
from hotloop.levers.flags import FLAGS
from hotloop.plan import Plan, Tuning
from hotloop.printing.text import shorten
from hotloop.records import Record
from hotloop.values.tree import tensors_in

Check = Callable[[Any], str | None]  # where a value is not what it should be, such as ".epochs[0]"; None: it is
_MOST = 1 << 62  # of a count
_SPARE = 1 << 20  # bytes that a state may take besides those that the file holds
_SHAPE = (2, 3, 4, 5, 6, 7, 8)  # of a parameter, as far as it has dimensions
UNSHAPED = "not shaped yet"
_STATES = 624  # numbers in the state of NumPy's MT19937, which does not check where in them it is told to be


def require(check: Check, value: Any, name: str) -> None:
    """Raise where a part of a checkpoint does not match its schema."""
    where = check(value)
    if where is not None:
        raise unusable(f"{name}{where} is not what a run of this loop saves there")


def count(value: Any) -> str | None:
    return None if type(value) is int and 0 <= value < _MOST else ""


def positive(value: Any) -> str | None:
    return None if count(value) is None and value else ""


def number(value: Any) -> str | None:
    return None if type(value) in (int, float) else ""


def seconds(value: Any) -> str | None:
    return None if type(value) in (int, float) and math.isfinite(value) and value >= 0 else ""


def unit(value: Any) -> str | None:
    return None if seconds(value) is None and value else ""


def text(value: Any) -> str | None:
    return None if type(value) is str else ""


def flag(value: Any) -> str | None:
    return None if type(value) is bool else ""


def anything(value: Any) -> str | None:
    return None


def items(value: Any) -> str | None:
    """A count of items, perhaps as a tensor on the device."""
    return None if count(value) is None or (isinstance(value, Tensor) and value.numel() == 1) else ""


def _key(value: Any) -> str | None:
    """The key of an attribute: number or name of an object, path of a module inside it, name."""
    match value:
        case (int() | str(), str(), str()) if type(value) is tuple:
            return None
    return ""


def tensor(value: Any) -> str | None:
    return None if isinstance(value, Tensor) else ""


def optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def each(check: Check, length: int | None = None) -> Check:
    """A list or tuple, of this length where one is given."""

    def check_all(value: Any) -> str | None:
        if not isinstance(value, list | tuple) or (length is not None and len(value) != length):
            return ""
        return next((f"[{n}]{where}" for n, item in enumerate(value) if (where := check(item)) is not None), None)

    return check_all


def table(key: Check, item: Check) -> Check:
    """A dict with keys of one kind and values of another."""

    def check_all(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return ""
        for name, inner in value.items():
            if key(name) is not None or (where := item(inner)) is not None:
                return f"[{name!r}]{where if key(name) is None else ''}"
        return None

    return check_all


def fields(may_lack: Sequence[str] = (), /, **checks: Check) -> Check:
    """A dict with these names, and perhaps unknown ones."""

    def check_all(value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return ""
        for name, check in checks.items():
            if name not in value and name in may_lack:
                continue
            if name not in value or (where := check(value[name])) is not None:
                return f".{name}{where if name in value else ''}"
        return None

    return check_all


def record(kind: type[Record]) -> Check:
    """The JSON of a sound record."""

    def check(value: Any) -> str | None:
        try:
            return None if kind.from_json(value).is_sound() else ""
        except (HotloopError, TypeError, ValueError, KeyError, AttributeError, LookupError):
            return ""

    return check


def is_real(value: Any) -> bool:
    """Whether it is a real number of any kind: Python's, NumPy's, or a tensor or array of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, np.ndarray | np.generic):
        return value.size == 1 and value.dtype.kind in "iuf"
    return type(value) in (int, float)


def like(mine: Any, *, words: bool = True, lengths: bool = True) -> Check:
    """A value like this one in types and shapes; `words`: equal strings and keys, `lengths`: lists of equal length."""
    return lambda value: _differs(mine, value, words, lengths)


def _differs(mine: Any, theirs: Any, words: bool, lengths: bool) -> str | None:
    if is_real(mine):
        return None if is_real(theirs) else ""
    if isinstance(mine, Tensor | np.ndarray):
        same = type(theirs) is type(mine) and theirs.dtype == mine.dtype and theirs.shape == mine.shape
        return None if same else ""
    if mine is None:
        return None if theirs is None or type(theirs) is bool or is_real(theirs) else ""
    if type(mine) is str:
        return None if type(theirs) is str and (theirs == mine or not words) else ""
    if isinstance(mine, Mapping):
        if not isinstance(theirs, Mapping) or (words and mine.keys() != theirs.keys()):
            return ""
        inner = ((f".{key}", mine[key], item) for key, item in theirs.items() if key in mine)
    elif isinstance(mine, list | tuple):
        if type(theirs) is not type(mine) or (lengths and len(mine) != len(theirs)):
            return ""
        inner = ((f"[{n}]", *pair) for n, pair in enumerate(zip(mine, theirs, strict=False)))
    else:
        return None if type(theirs) is type(mine) else ""
    return next((f"{at}{where}" for at, a, b in inner if (where := _differs(a, b, words, lengths)) is not None), None)


def check_module(name: str, values: Any) -> None:
    """Check the versions in a module's state_dict; `check_tensors` compares its tensors."""
    require(table(text, anything), values, name)
    versions = metadata_of(values)
    require(optional(table(text, table(text, anything))), versions, f"{name}, its versions")
    for layer in (versions or {}).values():
        require(optional(count), layer.get("version"), f"{name}, the version of a layer")


def check_random(mine: Mapping[str, Any], theirs: Any, name: str) -> None:
    """Check rng states by name; those unknown here are ignored."""
    require(table(text, anything), theirs, name)
    for kind in mine.keys() & theirs.keys():
        require(generator(mine[kind]), theirs[kind], f"{name}.{kind}")


def generator(mine: Any) -> Check:
    """The rng state of a generator of the same kind."""
    if type(mine) is tuple and len(mine) == 3:  # of Python, whose last part is there while `gauss` has a number left
        mine = (*mine[:2], None)

    def check(value: Any) -> str | None:
        where = like(mine)(value)
        if where is None and isinstance(value, Mapping):
            inner = value.get("state")
            if isinstance(inner, Mapping) and "pos" in inner and not 0 <= inner["pos"] <= _STATES:
                return ".state.pos"
        return where

    return check


@dataclass(frozen=True)
class OptimizerForm:
    """What a script builds of an optimizer: the form that its state in a checkpoint must have."""

    kind: type[Optimizer]
    defaults: frozenset[str]  # names of its settings; any other key of a group is the person's own
    groups: list[dict[str, Any]]  # their settings, and the numbers of their parameters
    shapes: list[list[tuple[int, ...] | None]]  # of these; None where the first batch decides

    @classmethod
    def of(cls, optimizer: Optimizer) -> Self:
        groups = optimizer.state_dict()["param_groups"] if tells_plainly(optimizer) else []
        shapes = [[None if is_lazy(p) else tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
        return cls(type(optimizer), frozenset(optimizer.defaults), [dict(group) for group in groups], shapes)


def check_optimizer(form: OptimizerForm, state: Any, *, tries: bool = True) -> None:
    """Check an optimizer's state_dict: groups like those here, and state of their parameters.

    With `tries`, an optimizer with its settings must make a step, which takes a millisecond for each group.
    """
    name = form.kind.__name__
    check_sharing(state, name)
    if form.kind.state_dict is not Optimizer.state_dict:
        return
    require(fields(state=table(anything, anything), param_groups=each(table(text, anything))), state, name)
    require(each(anything, len(form.groups)), state["param_groups"], f"{name}.param_groups")
    parameters: dict[Any, tuple[tuple[int, ...] | None, Callable[[int], dict[str, Any] | None]]] = {}
    for n, (group, shapes, saved) in enumerate(zip(form.groups, form.shapes, state["param_groups"], strict=True)):
        if saved.get("params") != group["params"]:
            raise unusable(f"{name}.param_groups[{n}].params are not those that are here")
        for key in saved.keys() - {"params", *FLAGS}:
            is_own = key not in form.defaults
            require(_setting(group.get(key), is_own=is_own), saved[key], f"{name}.param_groups[{n}].{key}")
        kept = cache(partial(_kept_for_a_parameter, form.kind, group, saved))
        parameters |= {number: (shape, kept) for number, shape in zip(group["params"], shapes, strict=True)}
    for key, held in state["state"].items():
        where = f"{name}.state[{key!r}]"
        if key in parameters:
            shape, wanted = parameters[key]
            _check_kept(shape, wanted(len(shape)) if tries and shape is not None else None, held, where)
        else:
            require(text, key, f"{name}.state, a key of which")
            require(_plain, held, where)


def tells_plainly(optimizer: Optimizer) -> bool:
    """Whether an optimizer uses PyTorch's own `state_dict`."""
    return type(optimizer).state_dict is Optimizer.state_dict


def _setting(mine: Any, *, is_own: bool) -> Check:
    """A setting of a group like the one here, where a list is as good as a tuple; a key of the person's own holds what
    it likes, but for numbers that stay numbers."""
    if is_own and not is_real(mine):
        return anything
    is_sequence = isinstance(mine, list | tuple)
    check = like(tuple(mine) if is_sequence else mine)
    return lambda value: check(tuple(value) if is_sequence and isinstance(value, list) else value)


def _kept_for_a_parameter(
    kind: type[Optimizer], group: Mapping[str, Any], saved: Mapping[str, Any], dimensions: int
) -> dict[str, Any] | None:
    """The state that PyTorch's optimizer keeps for a parameter, from a step of another one on a parameter of `_SHAPE`.

    None where that is impossible; raises for settings that PyTorch rejects.
    """
    if kind.__module__.partition(".")[0] != "torch":
        return None
    try:
        _stepped(kind, group, dimensions)
    except Exception:  # noqa: BLE001  # it wants something else: then only the kinds of what it keeps are known
        return None
    try:
        return _stepped(kind, {**group, **saved}, dimensions)
    except Exception as error:
        raise unusable(f"{kind.__name__} cannot load its settings: {error}") from error


def _stepped(kind: type[Optimizer], group: Mapping[str, Any], dimensions: int) -> dict[str, Any]:
    """The state of a parameter after a step of an optimizer with the settings of a group."""
    weight = nn.Parameter(torch.zeros(_SHAPE[:dimensions], device="cpu"))
    weight.grad = torch.zeros_like(weight)
    takes = inspect.signature(kind).parameters.keys() - {"params", *FLAGS}
    settings: dict[str, Any] = {
        key: value.cpu() if isinstance(value, Tensor) else value for key, value in group.items() if key in takes
    }
    other = kind([weight], **settings)
    with torch.no_grad():
        inspect.unwrap(kind.step)(other)  # without hooks, which may count the steps of all optimizers
    return dict(other.state[weight])


def _check_kept(shape: tuple[int, ...] | None, wanted: dict[str, Any] | None, kept: Any, where: str) -> None:
    """Check the state of a parameter: all entries that are expected, in the parameter's shape where they have it."""
    require(table(text, _plain), kept, where)
    if not kept or wanted is None:
        return
    for key, mine in wanted.items():
        value = kept.get(key)
        if not isinstance(mine, Tensor):
            fits = key in kept
        elif mine.numel() == 1 and shape:  # a count of steps; one on a device was not read from a file
            fits = is_real(value) and (not getattr(value, "is_cpu", True) or float(value) >= 0)
        else:
            whole = mine.shape != _SHAPE[: mine.dim()] or getattr(value, "shape", None) == shape
            fits = isinstance(value, Tensor) and whole and (value.is_floating_point() or value.is_complex())
        if not fits:
            raise unusable(f"{where}.{key} does not fit a parameter of shape {shape}")


def _plain(value: Any) -> str | None:
    """Numbers and tensors, and lists and dicts of them."""
    if isinstance(value, Tensor | np.ndarray | np.number) or value is None or type(value) in (bool, int, float):
        return None
    if isinstance(value, Mapping):
        return table(anything, _plain)(value)
    return each(_plain)(value)


def check_scheduler(kind: type, mine: Mapping[str, Any], state: Any) -> None:
    """Check a scheduler's state_dict against the one that the script builds; `known_to` drops unknown names."""
    require(table(text, anything), state, kind.__name__)
    is_own = kind.__module__.partition(".")[0] != "torch"  # its lists may grow
    known = {key: state[key] for key in state if key in mine}
    require(like(mine, words=False, lengths=not is_own), known, kind.__name__)


def known_to(scheduler: Any, mine: Mapping[str, Any], state: Mapping[str, Any]) -> list[str]:
    """Names in a scheduler's state that it may load: its own, and numbers that appear later."""
    return [key for key in state if key in mine or (not hasattr(scheduler, key) and _plain(state[key]) is None)]


def check_sharing(state: Any, name: str) -> None:
    """Raise where a few tensors are referenced many times, each of which would become a copy."""
    several = [tensor for _, tensor in tensors_in(state)]
    once = {id(value): value for value in several}
    if sum(v.numel() for v in several) > 2 * sum(v.numel() for v in once.values()) + _SPARE:
        raise unusable(f"{name} names the same tensors again and again")


_WATCH = fields(
    names=each(text),
    batches=count,
    items=items,
    latest=optional(number),
    curve=each(each(number, 2)),
    stride=positive,
    totals=each(number),
    sums=optional(tensor),
)


def _watch(value: Any) -> str | None:
    """Check the sums of an epoch's losses: one for each name, once there was a batch."""
    where = _WATCH(value)
    if where is not None:
        return where
    losses, sums, seen = len(value["names"]), value["sums"], type(value["items"]) is not int or value["items"] > 0
    if sums is not None and (sums.shape != (losses,) or not sums.is_floating_point()):
        return ".sums"
    return None if len(value["totals"]) == losses or (sums is not None or not seen) else ".totals"


_AGREEMENT = fields(ranks=positive, windows=count, unit=unit, ratio=optional(seconds), on_device=flag, is_sum=flag)
LOOP = fields(
    others=each(anything),
    loose=each(tensor),
    buffers=each(table(text, optional(tensor))),
    optimizers=each(anything),
    held=each(fields(kind=text, groups=each(each(text)))),
    schedulers=each(anything),
    kinds=each(text),
    update=fields(
        ("windows", "losses"),
        steps=count,
        skipped=count,
        scalers=table(text, table(text, seconds)),
        across=table(text, _AGREEMENT),
        windows=count,
        losses=table(text, tensor),
    ),
    portion=fields(
        limit=optional(positive),
        failures=count,
        cuts=count,
        _room_at_failure=optional(count),
        _room_at_try=count,
        _good=optional(positive),
        _passes=count,
        _largest=count,
        _patience=positive,
    ),
    watch=_watch,
    random=table(text, anything),
    epoch=count,
    plan=record(Plan),
    tuning=optional(record(Tuning)),
    considered=optional(count),
)
CHANGES = fields(
    attributes=table(_key, anything),
    devices=table(_key, each(text)),
    device=text,
    learns=table(_key, flag),
    schedulers=each(each(text)),
    given=table(text, anything),
    found=table(text, anything),
    generators=table(text, each(anything, 2)),
)


AS_IT_WAS = "build it as it was, or choose another folder for a new run"


def check_tensors(what: str, mine: Mapping[str, str], there: Mapping[str, Any]) -> None:
    """Raise for a state_dict with other names or shapes than those that `shapes_of` gives of the one here."""
    theirs = shapes_of(there)
    wrong = [n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n) and mine.get(n) != UNSHAPED]
    if wrong:
        first = sorted(wrong)[0]
        differ = "tensor differs" if len(wrong) == 1 else "tensors differ"
        raise BadArgument(
            f"the checkpoint is of another {what}: {len(wrong)} {differ} ({shorten(sorted(wrong), 3)});"
            f" {first} is {mine.get(first, 'not there')} here and {theirs.get(first, 'not there')} in the checkpoint",
            fix=AS_IT_WAS,
        )


def shapes_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Dtype and shape of each tensor of a state_dict, in words; `UNSHAPED` where the first batch decides."""
    return {name: _shape(value) for name, value in state.items()}


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return UNSHAPED if is_lazy(value) else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
