"""`golden_rule`: one operation, one device; a break is explained by tensor, by line and by the line to write."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import _GeneratorContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, get_testing_overrides, resolve_name
from torch.utils.weak import WeakIdKeyDictionary

from hotloop._torch import SHALLOW_COPY_CHECK
from hotloop.errors import BadArgument, DeviceMismatch
from hotloop.placement.moving import shape_of
from hotloop.placement.sites import Site, as_buffer, frames, site_of, user_frames, user_site, variables
from hotloop.values.tree import tensors_in

_NUMPY: set[Callable[..., Any]] = {torch.Tensor.numpy, torch.Tensor.__array__}
# What crosses devices on purpose; the last is a question that `Module.to` asks on the way.
_CROSSINGS = {"to", "copy_", "__set__", "cpu", "cuda", "type", "type_as", "set_", SHALLOW_COPY_CHECK}
_OF_SWAPS = {"detach", "requires_grad_", "__get__"}  # by which `Module.to` makes a parameter of what it has moved
_INDEXING = {"__getitem__", "__setitem__"}  # may take its indices from the host


def golden_rule(model: nn.Module | None = None) -> _GeneratorContextManager[None]:
    """Explain every operation that mixes devices, and `.numpy()` on a tensor that is not on the host.

    A context manager and, with brackets, a decorator. Inside it such an operation raises `DeviceMismatch`, which names
    each tensor (argument, shape, dtype, device, and the module path of a parameter), the line of the operation, the
    line where each tensor was made or moved, and the line to write instead. Modules whose `forward` is running, or
    that are variables where the operation stands, are found by themselves; hand in a `model` that is neither.

    It is an aid for debugging: every operation passes through Python, some 10 to 30 µs each, so that small models
    run several times slower inside it. Nothing remains when it ends.

    >>> with golden_rule():
    ...     x = torch.zeros(2, 3)
    ...     w = torch.zeros(3, 4, device="meta")
    ...     y = x @ w
    Traceback (most recent call last):
    hotloop.errors.DeviceMismatch: ...
    """
    if model is not None and not isinstance(model, nn.Module):
        raise BadArgument(f"golden_rule was given {model!r}", fix="as a decorator, call it: @golden_rule()")
    return _watching(model)


@contextmanager
def _watching(model: nn.Module | None) -> Iterator[None]:
    with _Watch(model):
        yield


@dataclass(frozen=True)
class Origin:
    """Where a tensor comes from."""

    verb: str  # made, or moved between devices
    site: Site


class _Origins:
    """Where tensors come from, for as long as they are there."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()
        self._swapped: dict[int, tuple[Tensor, Origin]] = {}  # of parameters that a module has moved, which are held

    def note(self, tensor: Tensor, origin: Origin) -> None:
        self._swapped.pop(id(tensor), None)
        self._known[tensor] = origin

    def get(self, tensor: Tensor) -> Origin | None:
        swapped = self._swapped.get(id(tensor))
        found: Origin | None = self._known.get(tensor) if swapped is None else swapped[1]
        return found

    def let_swap(self, before: Tensor, after: Tensor) -> None:
        """A module is about to put `after` in the place of a parameter; PyTorch swaps none with a weak reference."""
        origin = self.get(after) or self.get(before)
        for tensor in (before, after):
            self._known.pop(tensor, None)
        if origin is not None:
            self._swapped[id(before)] = before, origin


class _Watch(TorchFunctionMode):
    """Sees every torch function; remembers where tensors come from; translates what torch refuses."""

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()
        self._model = model
        self._origins = _Origins()
        self._swaps = False  # whether a module makes a parameter of what it has moved

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        try:
            if _mixes_meta(func, args, kwargs):
                raise RuntimeError("tensors without data (meta) were mixed with real ones")
            result = func(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            explained = self._explain(error, func, args, kwargs)
            if explained is None:
                raise
            raise explained from error
        self._remember(func, args, result)
        return result

    def _remember(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        name = getattr(func, "__name__", "")
        if name == SHALLOW_COPY_CHECK and len(args) == 2:
            self._origins.let_swap(*args)
            self._swaps = True
            return
        self._swaps = self._swaps and name in _OF_SWAPS
        if self._swaps:
            return
        made = [args[0]] if name == "__set__" and args else [t for _, t in tensors_in(result)]
        if not made or not isinstance(made[0], Tensor):
            return
        site = user_site()
        if site is None:
            return
        for tensor in made:
            given = next((a for a in args if isinstance(a, Tensor)), None)
            crossed = name == "__set__" or (given is not None and given.device != tensor.device)
            if crossed or self._origins.get(tensor) is None:
                self._origins.note(tensor, Origin("moved" if crossed else "made", site))

    def _explain(
        self, error: Exception, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> DeviceMismatch | None:
        """The error to raise instead, or None where devices are not what went wrong."""
        operands = list(operands_of(func, args, kwargs))
        scene = Scene(user_frames(), modules_in_sight(self._model), self._origins)
        if func in _NUMPY:
            return None if operands[0][1].is_cpu else _numpy_error(operands[0][1], scene)
        devices = sorted({str(t.device) for _, t in operands})
        if len(devices) < 2 or getattr(func, "__name__", "") in _CROSSINGS:
            return None
        welcome = len({t.device for _, t in operands if not _is_host_scalar(t)}) < 2
        if welcome and "device" not in str(error):
            return None  # only a number from the host is elsewhere, and torch does not complain of it
        target = _where_to_meet(operands)
        what = f"{_name(func)} was given tensors on {' and '.join(devices)}; one operation needs one device"
        strangers = [(arg, t) for arg, t in operands if t.device != target and (welcome or not _is_host_scalar(t))]
        return DeviceMismatch(scene.tell(what, operands), fix=scene.remedies(strangers, target))


@dataclass(frozen=True)
class Scene:
    """What the stack at the failing line knows about tensors: variables, modules, and where they came from."""

    frames: list[FrameType]  # the person's own, innermost first
    modules: list[nn.Module]  # outermost first
    origins: Any

    def tell(self, what: str, operands: Iterable[tuple[str, Tensor]]) -> str:
        lines = [what, *(f"  {line}" for arg, t in operands for line in self.describe(arg, t))]
        return "\n".join([*lines, f"  at {site_of(self.frames[0])}"] if self.frames else lines)

    def describe(self, arg: str, tensor: Tensor) -> Iterator[str]:
        yield self.named(arg, tensor)
        origin = self.origins.get(tensor)
        yield (f"    {origin.verb} at {origin.site}" if origin else "    the line that made it was not seen")

    def named(self, arg: str, tensor: Tensor) -> str:
        """An argument with the words that the person has for it, its shape and its device."""
        path, kind = self.owner(tensor)
        variable = self.variable(tensor, self.frames[:1])
        names = [f"{kind} {path}"] * bool(path) + [f"variable {variable}"] * bool(variable)
        known = f" ({', '.join(names)})" if names else ""
        return f"{arg}{known}: {shape_of(tensor)} on {tensor.device}"

    def remedies(self, strangers: list[tuple[str, Tensor]], target: torch.device) -> str:
        """The lines to write instead."""
        owners = {id(t): self.owner(t) for _, t in strangers}
        registered = [path for path, kind in owners.values() if kind in ("parameter", "buffer")]
        lines = [f'hotloop.place(model, "{target}")  # moves {", ".join(registered)}'] if registered else []
        lines += [self.remedy(arg, t, target) for arg, t in strangers if owners[id(t)][0] not in registered]
        return "\n       ".join(dict.fromkeys(lines))

    def remedy(self, arg: str, tensor: Tensor, target: torch.device) -> str:
        """The line to write instead, for a tensor that PyTorch does not move with its model."""
        path, kind = self.owner(tensor)
        if kind == "attribute":
            attribute = path.rsplit(".", 1)[-1]
            origin = self.origins.get(tensor)
            return as_buffer(attribute, origin.site if origin else None)
        if name := self.variable(tensor, self.frames[::-1]):  # outermost first: there the batch is still whole
            return f'{name} = {name}.to("{target}")'
        if any(isinstance(variables(f).get("self"), Optimizer) for f in frames()):
            return f'hotloop.place(model, "{target}", optimizer)  # moves the state of the optimizer too'
        origin = self.origins.get(tensor)
        if origin and origin.verb == "made":
            return f'device="{target}" where {arg} is made: {origin.site}'
        return f'{arg}.to("{target}")'

    def variable(self, tensor: Tensor, among: list[FrameType]) -> str | None:
        """The local variable that holds the tensor in the first of these frames that has one."""
        return next((name for f in among for name, value in variables(f).items() if value is tensor), None)

    def owner(self, tensor: Tensor) -> tuple[str, str]:
        """The path of a parameter, buffer or plain attribute in the outermost module that holds it, and which it is."""
        for module in self.modules:
            for kind, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
                for path, value in named:
                    if value is tensor:
                        return path, kind
            for prefix, sub in module.named_modules():
                for name, value in vars(sub).items():
                    if value is tensor:
                        return f"{prefix}.{name}".lstrip("."), "attribute"
        return "", ""


def operands_of(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor argument with the name that the documentation gives it."""
    names = _parameter_names(func)
    for i, arg in enumerate(args):
        yield from tensors_in(arg, names[i] if i < len(names) else f"argument {i + 1}")
    for name, arg in kwargs.items():
        yield from tensors_in(arg, name)


@cache
def _parameter_names(func: Callable[..., Any]) -> tuple[str, ...]:
    signed = get_testing_overrides().get(func, func)  # torch's own table: most functions are C and have no signature
    try:
        return tuple(inspect.signature(signed).parameters)
    except (TypeError, ValueError):
        return ()


def _mixes_meta(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether real and meta tensors meet: torch lets some of these through and computes on nothing."""
    name = getattr(func, "__name__", "")
    if name in _CROSSINGS | _INDEXING or name.startswith("_nested_"):  # which are given a meta tensor for its type
        return False
    kinds = {t.is_meta for _, t in operands_of(func, args, kwargs) if not _is_host_scalar(t)}
    return len(kinds) == 2


def _is_host_scalar(tensor: Tensor) -> bool:
    """A number in a tensor on the host may meet any device."""
    return tensor.is_cpu and tensor.dim() == 0


def _where_to_meet(operands: Iterable[tuple[str, Tensor]]) -> torch.device:
    """The device to bring the others to: the accelerator, and of several the one that holds most tensors."""
    tensors = [t for _, t in operands]
    devices = [t.device for t in tensors if not t.is_cpu] or [t.device for t in tensors]
    return max(devices, key=devices.count)


def modules_in_sight(model: nn.Module | None) -> list[nn.Module]:
    """The modules in sight: the one that was given, those whose `forward` is running (outermost first), variables."""
    stack = list(frames())[::-1]
    running = [variables(f)["self"] for f in stack if isinstance(variables(f).get("self"), nn.Module)]
    in_scope = [v for f in user_frames() for v in variables(f).values() if isinstance(v, nn.Module)]
    return list(dict.fromkeys([*([model] if model is not None else []), *running, *in_scope]))


def _name(func: Callable[..., Any]) -> str:
    return resolve_name(func) or str(getattr(func, "__name__", func))


def _numpy_error(tensor: Tensor, scene: Scene) -> DeviceMismatch:
    what = f".numpy() was called on a tensor on {tensor.device}; NumPy reads host memory only"
    name = scene.variable(tensor, scene.frames) or "tensor"
    return DeviceMismatch(scene.tell(what, [("self", tensor)]), fix=f"hotloop.to_numpy({name})")
