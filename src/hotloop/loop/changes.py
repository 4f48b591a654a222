"""`Changes`: what a run has changed besides weights: numbers that modules keep, what learns, how far schedulers are.

A value that was never changed is a setting, and belongs to the script: a dropout rate, the length of a schedule. One
that was is progress, and belongs to the checkpoint: a counter, a temperature that falls, the epoch of a schedule. So
only what differs from the beginning of the run is saved, and a person may go on with other settings.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hotloop.checkpoint.tree import pack
from hotloop.data.chance import Chance, Moment

Key = tuple[int, str, str]  # the number of a module, the path of one inside it, the name of an attribute
_PLAIN = (bool, int, float, str, type(None))
_LARGE = 1 << 20  # bytes of a tensor from which on it is not kept alive for a comparison
LOST: Any = object()
_MADE = ("lr_lambdas", "_schedulers")  # entries of a scheduler's state that are not its attributes


class Changes:
    """Compares modules and schedulers with what they were when this was made."""

    def __init__(self, modules: Sequence[nn.Module], schedulers: Sequence[LRScheduler]) -> None:
        self._modules = modules
        self._schedulers = schedulers
        self._marks = _marks(modules)
        self._learns = _learns(modules)
        self._left: tuple[dict[Key, _Mark], dict[Key, bool]] | None = None
        self._settings = [dict(vars(scheduler)) for scheduler in schedulers]
        self._forms = [{k: _form(v) for k, v in scheduler.state_dict().items()} for scheduler in schedulers]
        self._known: set[Key] = set()  # changed in an earlier part of the run
        self._known_steps: list[set[str]] = [set() for _ in schedulers]

    def to_state(self) -> dict[str, Any]:
        """What has changed, as plain data and tensors."""
        for number, scheduler in enumerate(self._schedulers):
            before = self._forms[number]
            now = scheduler.state_dict().items()
            self._known_steps[number] |= {k for k, v in now if k not in before or before[k] != _form(v)}
        return {
            "attributes": {
                key: value
                for key, _, value in _attributes(self._modules)
                if key in self._known or key not in self._marks or not self._marks[key].fits(value)
            },
            "learns": {
                key: parameter.requires_grad
                for key, parameter in _parameters(self._modules)
                if key in self._known or self._learns.get(key) != parameter.requires_grad
            },
            "schedulers": [sorted(names) for names in self._known_steps],
        }

    def leave(self) -> None:
        """Remember how a part of the run ends: what differs when the same loop goes on was set by the person."""
        self._left = _marks(self._modules), _learns(self._modules)

    def put(self, state: dict[str, Any], device: torch.device) -> None:
        """Make the same changes; the schedulers have loaded a whole state, and get back what are settings of theirs."""
        self._undo()
        self._known = {*state["attributes"], *state["learns"]}
        self._known_steps = [set(names) for names in state["schedulers"]]
        owners = {(number, path): inner for number, path, inner in _inner(self._modules)}
        for (number, path, name), value in state["attributes"].items():
            owner = owners.get((number, path))
            if owner is not None and _is_kept(vars(owner).get(name)):
                now = vars(owner).get(name)
                vars(owner)[name] = value.to(getattr(now, "device", device)) if isinstance(value, Tensor) else value
        for key, parameter in _parameters(self._modules):
            if key in state["learns"]:
                parameter.requires_grad_(state["learns"][key])
        for scheduler, settings, changed in zip(self._schedulers, self._settings, self._known_steps, strict=True):
            kept = scheduler.state_dict().keys() & settings.keys() - changed - set(_MADE)
            vars(scheduler).update({name: settings[name] for name in kept})

    def _undo(self) -> None:
        """Where the same loop goes on: be as at the beginning, but for what the person has set since."""
        if self._left is None:
            return
        marks, learns = self._left
        for key, owner, value in list(_attributes(self._modules)):
            begin, end = self._marks.get(key), marks.get(key)
            if begin is None or end is None or not end.fits(value):
                self._marks[key] = _Mark(value)
            elif not begin.fits(value) and begin.value is not LOST:
                vars(owner)[key[2]] = begin.value
        for key, parameter in _parameters(self._modules):
            if learns.get(key) == parameter.requires_grad:
                parameter.requires_grad_(self._learns.get(key, parameter.requires_grad))
            else:
                self._learns[key] = parameter.requires_grad


def _marks(modules: Sequence[nn.Module]) -> dict[Key, "_Mark"]:
    return {key: _Mark(value) for key, _, value in _attributes(modules)}


def _learns(modules: Sequence[nn.Module]) -> dict[Key, bool]:
    return {key: parameter.requires_grad for key, parameter in _parameters(modules)}


def _inner(modules: Sequence[nn.Module]) -> Iterator[tuple[int, str, nn.Module]]:
    for number, module in enumerate(modules):
        for path, inner in module.named_modules():
            yield number, path, inner


def _attributes(modules: Sequence[nn.Module]) -> Iterator[tuple[Key, nn.Module, Any]]:
    """Plain numbers, words and tensors that modules hold as attributes, and may change while they run."""
    for number, path, inner in _inner(modules):
        for name, value in vars(inner).items():
            if _is_kept(value):
                yield (number, path, name), inner, value


def _parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[Key, nn.Parameter]]:
    for number, path, inner in _inner(modules):
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                yield (number, path, name), parameter


def _is_kept(value: object) -> bool:
    if type(value) in _PLAIN:
        return True
    # A tensor that remembers what it was computed from is a result that somebody wanted to look at.
    return (
        type(value) is Tensor
        and value.grad_fn is None
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_meta)
    )


class _Mark:
    """A value as it was, for a comparison that does not look at what is on a device."""

    def __init__(self, value: Any) -> None:
        is_large = isinstance(value, Tensor) and value.nbytes > _LARGE
        self._value: Callable[[], Any] = weakref.ref(value) if is_large else partial(_same, value)
        self._version = _version(value)

    @property
    def value(self) -> Any:
        """What it was; `LOST` where that was changed in place, or was too large to be kept for this."""
        value = self._value()
        if not isinstance(value, Tensor):
            return value if self._version is None else LOST
        return value if self._version == _version(value) is not None else LOST

    def fits(self, value: Any) -> bool:
        """Whether this is the same value still."""
        was = self.value
        if isinstance(value, Tensor):
            return was is value
        return type(value) is type(was) and repr(value) == repr(was)  # nan is itself


def _same(value: Any) -> Any:
    return value


def _version(value: Any) -> int | None:
    """How often a tensor was changed in place, where that is known."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _form(value: Any) -> Any:
    """A part of a scheduler's state for comparison; one with tensors counts as changed."""
    tensors, plain = pack(value)
    return object() if tensors else plain


class Draws:
    """The generators of random numbers that the loader of an evaluation holds itself, from epoch to epoch."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        """`state` is what an earlier part of the run had come to."""
        self._state = state
        self._chance: Chance | None = None

    def of(self, loader: object) -> None:
        """Follow this loader, after it was brought to where it was."""
        if loader is None:
            return
        here = isinstance(loader, DataLoader) and not loader.num_workers  # where items are made
        self._chance = Chance(loader, loader.dataset if here and isinstance(loader, DataLoader) else None)
        if self._state is not None:
            own, samplers = tuple(self._state["own"]), tuple(self._state["samplers"])
            self._chance.put_own(Moment(torch.get_rng_state(), own=own, samplers=samplers))

    def to_state(self) -> dict[str, Any] | None:
        """Where they are, as plain data and tensors."""
        if self._chance is None:
            return None
        moment = self._chance.note()
        return {"own": list(moment.own), "samplers": list(moment.samplers)}
