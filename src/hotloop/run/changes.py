"""`Changes`: what a run has changed besides weights: attributes of objects, `requires_grad`, progress of schedulers.

A value that was never changed is a setting, and belongs to the script: a dropout rate, the length of a schedule. One
that was is progress, and belongs to the checkpoint: a counter, a queue, a temperature that falls, the epoch of a
schedule. So only what differs from the beginning of the run is saved, and a person may go on with other settings.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from hotloop._torch import (
    BUFFERS,
    FUSED_NOTES,
    OF_MODULES,
    PARAMETERS,
    SCHEDULER_NOTES,
    SCHEDULERS,
    gradient_hooks,
    parameters_of,
)
from hotloop.checkpoint.codec import pack
from hotloop.checkpoint.damage import unusable
from hotloop.data.loader_rng import is_stateful
from hotloop.data.origin import owner_of
from hotloop.run.checks import check_sharing, is_state_of_generator, require
from hotloop.run.schedulers import functions_in
from hotloop.values.attributes import (
    HOOKS_INSTALLED,
    LITTLE,
    LOST,
    PlainValue,
    Restoring,
    ValueSnapshot,
    devices_of,
    may_become,
    moved,
    plain,
)
from hotloop.values.kinds import ROOM
from hotloop.values.reach import ReachableState, installed_once, is_ours, look
from hotloop.values.rng import Generator, Rng
from hotloop.values.saved import HasState, Saved, load_objects

Key = tuple[int | str, str, str]  # the number or name of an object, the path of a module inside it, an attribute
_OF_MODULES = (OF_MODULES | {HOOKS_INSTALLED}) - {"training"}  # attributes that PyTorch keeps for itself
_MADE = ("lr_lambdas", SCHEDULERS)  # entries of a scheduler's state that are not its attributes
_SHARE, _FREE = 0.01, 0.2  # of the time of a run and, in seconds, besides that: for looks at what no checkpoint holds


class Changes(HasState):
    """Compares the objects of a run with their state at its beginning."""

    name = "python_state"
    attributes: Saved[dict[Key, Any]]  # that changed
    devices: Saved[dict[Key, list[str]]]  # of the tensors in each
    device: Saved[str]
    requires_grad: Saved[dict[Key, bool]]  # of parameters where it changed
    schedulers: Saved[list[list[str]]]  # names of what changed in the state of each
    found: Saved[dict[str, Any]]  # states of objects with a state_dict
    generators: Saved[dict[str, tuple[str, Any]]]  # type and rng state, by the path on which each was reached

    def __init__(
        self,
        modules: Sequence[nn.Module],
        schedulers: Sequence[LRScheduler],
        others: Mapping[str, object] | None = None,
        stateful: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        known: Sequence[object] = (),
    ) -> None:
        """`others` are further objects of the run, by name; `stateful` those that the person asks to be saved.

        The state of `known` objects is saved elsewhere: the loop itself, its loaders.
        """
        self.known = list(known)
        self._modules = modules
        self._schedulers = schedulers
        self._handed = dict(others or {})
        self._others = self._owned(self._handed)
        self._given = dict(stateful or {})
        self._device = device or torch.device("cpu")
        self._generators: dict[str, Generator] = {}  # by the path on which each was reached
        self._marks = self._marked()
        self._requires_grad = _requires_grad(modules)
        self._left: tuple[dict[Key, ValueSnapshot], dict[Key, bool]] | None = None
        self._settings = [dict(vars(scheduler)) for scheduler in schedulers]
        self._forms = [{k: _form(v) for k, v in scheduler.state_dict().items()} for scheduler in schedulers]
        self._known: set[Key] = set()  # changed in an earlier part of the run
        self._known_steps: list[set[str]] = [set() for _ in schedulers]

    def hand(self, others: Mapping[str, object], stateful: Mapping[str, Any], known: Sequence[object]) -> None:
        """Take the objects of the next part of the run in the same loop, which may be others."""
        self.known = list(known)
        before = self._others
        self._handed = dict(others)
        self._others = self._owned(others)
        self._given = dict(stateful)
        new = {name for name, thing in self._others.items() if before.get(name) is not thing}
        self._marks = {key: mark for key, mark in self._marks.items() if key[0] not in new}
        self._marks |= {key: mark for key, mark in self._marked().items() if key[0] in new}
        if self._left is not None:
            self._left = {key: mark for key, mark in self._left[0].items() if key[0] not in new}, self._left[1]

    def state_dict(self) -> dict[str, Any]:
        """The values that changed, as plain data and tensors."""
        for number, scheduler in enumerate(self._schedulers):
            before = self._forms[number]
            now = scheduler.state_dict().items()
            self._known_steps[number] |= {k for k, v in now if k not in before or before[k] != _form(v)}
        attributes = {
            key: parts.whole()  # with containers of its own, for training goes on
            for key, _, parts in self._attributes()
            if key in self._known or key not in self._marks or not self._marks[key].fits(parts)
        }
        return {
            "attributes": attributes,
            "devices": {key: on for key, value in attributes.items() if (on := devices_of(value))},
            "device": self._device.type,
            "requires_grad": {
                key: parameter.requires_grad
                for key, parameter in _parameters(self._modules)
                if key in self._known or self._requires_grad.get(key) != parameter.requires_grad
            },
            "schedulers": [sorted(names) for names in self._known_steps],
            "found": {name: thing.state_dict() for name, thing in self._found().items()},
            "generators": {
                path: (type(each).__name__, Rng.of(each).get_state()) for path, each in self._generators.items()
            },
        }

    def leave(self) -> None:
        """Note the state at the end of a part of the run: later differences were made by the person."""
        self._left = self._marked(), _requires_grad(self._modules)

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise for a state that is damaged or not of this run, before anything has changed."""
        super().check(state)
        if len(state["schedulers"]) != len(self._schedulers):
            raise unusable("python_state.schedulers are not as many as the schedulers")
        for key, kinds in state["devices"].items():
            if key not in state["attributes"] or len(kinds) != len(devices_of(state["attributes"][key])):
                raise unusable(f"python_state.devices{list(key)} are not those of its tensors")
        check_sharing(list(state["attributes"].values()), "python_state.attributes")

    def load_attributes(self, state: Mapping[str, Any], device: torch.device) -> list[str]:
        """Set the changed attributes and `requires_grad`; returns the names that could not be set."""
        self._undo()
        self._known = {*state["attributes"], *state["requires_grad"]}
        missing = self._load_attributes(state, device)
        for key, parameter in _parameters(self._modules):
            if key in state["requires_grad"]:
                parameter.requires_grad_(state["requires_grad"][key])
        return missing

    def restore_settings(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        """Give schedulers, which have loaded a whole state, their settings from the script again."""
        undo.callback(setattr, self, "_known_steps", self._known_steps)
        self._known_steps = [set(names) for names in state["schedulers"]]
        for scheduler, settings, changed in zip(self._schedulers, self._settings, self._known_steps, strict=True):
            kept = scheduler.state_dict().keys() & settings.keys() - changed - set(_MADE)
            vars(scheduler).update({name: settings[name] for name in kept})

    def load_found(self, state: Mapping[str, Any], undo: ExitStack) -> list[str]:
        """Load the states of objects with a `state_dict`; returns the names found on one side only."""
        return load_objects(self._found(), state["found"], undo)

    def search(self) -> None:
        """Find the generators reachable from the objects of the run, except the loader's own."""
        self._generators = self._reached(self._roots(data=False)).generators

    def look(self, extra: Mapping[str, object]) -> ReachableState:
        """Everything reachable that is not in the checkpoint; from `extra` too."""
        seen = self._reached({**self._roots(data=True), **extra}, self._told(), extra.values())
        for path in seen.generators:
            seen.values.pop(path, None)
        return seen

    @property
    def is_lazy(self) -> bool:
        """Whether there are lazy layers, which the first batch replaces."""
        return any(isinstance(inner, LazyModuleMixin) for module in self._modules for inner in module.modules())

    def _reached(
        self, roots: Mapping[str, object], known: Iterable[object] = (), more: Iterable[object] = ()
    ) -> ReachableState:
        """Everything reachable, except attributes in the checkpoint, those of `more` among them."""
        holders = {id(owner): room for _, _, owner, room in self._owners()} | {id(owner): ROOM for owner in more}

        def holds(owner: object, name: str, value: object) -> bool:
            if isinstance(owner, Optimizer) and name in _of_optimizers():
                return not name.endswith("_hooks")
            room = holders.get(id(owner))
            if room is None:
                return False
            if isinstance(owner, nn.Module) and name in _OF_MODULES:
                return name in (PARAMETERS, BUFFERS) or installed_once(name, value)
            return plain(value, room) is not None or (isinstance(value, Tensor) and value.grad_fn is not None)

        return look(roots, holds, chain(known, self.known, self._weights()))

    def _owned(self, things: Mapping[str, object]) -> dict[str, Any]:
        """The owner of each object's state, except parts of modules, which are saved with these."""
        inside = {id(inner) for module in self._modules for inner in module.modules()}
        owners = {name: owner_of(thing) for name, thing in things.items()}
        return {name: owner for name, owner in owners.items() if id(owner) not in inside and not is_ours(owner)}

    def _found(self) -> dict[str, Any]:
        """Objects of the run with a `state_dict` that a checkpoint can hold."""
        told = {n: t for n, t in self._others.items() if is_stateful(t) and not isinstance(t, Optimizer)}
        return {name: thing for name, thing in told.items() if _can_be_packed(thing)}

    def _owners(self) -> Iterator[tuple[int | str, str, Any, int]]:
        """All objects whose attributes are saved, and the most bytes of one attribute."""
        known = {id(each) for each in self.known}
        for root, path, owner, room in self._holders():
            yield root, path, owner, room
            for name, value in list(vars(owner).items()):
                if id(value) not in known and _is_record(value):
                    yield root, f"{path}<{name}>", value, room

    def _holders(self) -> Iterator[tuple[int | str, str, Any, int]]:
        for number, module in enumerate(self._modules):
            for path, inner in module.named_modules():
                yield number, path, inner, ROOM
        found = self._found()
        for name, thing in self._others.items():
            if isinstance(thing, nn.Module):
                for path, inner in thing.named_modules():
                    yield name, path, inner, ROOM
            elif name not in found and isinstance(getattr(thing, "__dict__", None), dict):
                yield name, "", thing, LITTLE if isinstance(thing, Dataset) else ROOM

    def _attributes(self) -> Iterator[tuple[Key, Any, PlainValue]]:
        """Attributes with plain values, which may change in training."""
        for root, path, owner, room in self._owners():
            own = _internals_of(owner)
            for name, value in vars(owner).items():
                if name not in own and (parts := plain(value, room)) is not None:
                    yield (root, path, name), owner, parts

    def _marked(self) -> dict[Key, ValueSnapshot]:
        return {key: ValueSnapshot(parts) for key, _, parts in self._attributes()}

    def _load_attributes(self, state: Mapping[str, Any], device: torch.device) -> list[str]:
        owners = {(root, path): owner for root, path, owner, _ in self._owners()}
        names, restoring, missing = dict(enumerate(["model"])), Restoring(), []
        for key, saved in state["attributes"].items():
            root, path, name = key
            owner = owners.get((root, path))
            now = None if owner is None else vars(owner).get(name)
            is_plain = owner is not None and name not in _internals_of(owner) and (now is None or plain(now))
            if not is_plain or not may_become(owner, name, saved):
                missing.append(".".join(filter(None, (str(names.get(root, root)), path, name))))
                continue
            was = state["devices"].get(key)
            value = saved
            if isinstance(saved, Tensor):
                value = saved.to(getattr(now, "device", device))
            elif was:
                host = torch.device("cpu")
                value = moved(saved, (device if kind == state["device"] else host for kind in was))
            restoring.put(vars(owner), name, value)
        return missing

    def load_generators(self, state: Mapping[str, Any], undo: ExitStack) -> list[str]:
        """Set the states of reachable generators; returns the paths of those not found."""
        self.search()
        found, missing = self._generators, []
        for path, (kind, taken) in state["generators"].items():
            if path in found and type(found[path]).__name__ == kind:
                rng = Rng.of(found[path])
                now = rng.get_state()
                require(is_state_of_generator(now, taken), f"python_state.generators[{path!r}]")
                undo.callback(rng.set_state, now)
                rng.set_state(taken)
            else:
                missing.append(path)
        return missing

    def _undo(self) -> None:
        """Restore the state of the beginning, except what the person has set since, where the same loop resumes."""
        if self._left is None:
            return
        marks, requires_grad = self._left
        restoring = Restoring()
        for key, owner, parts in list(self._attributes()):
            begin, end = self._marks.get(key), marks.get(key)
            if begin is None or end is None or not end.fits(parts):
                self._marks[key] = ValueSnapshot(parts)
            elif not begin.fits(parts) and (value := begin.value) is not LOST:
                restoring.put(vars(owner), key[2], value)
        for key, parameter in _parameters(self._modules):
            if requires_grad.get(key) == parameter.requires_grad:
                parameter.requires_grad_(self._requires_grad.get(key, parameter.requires_grad))
            else:
                self._requires_grad[key] = parameter.requires_grad

    def _roots(self, *, data: bool) -> dict[str, object]:
        """The roots of a look, by name; each module is one, so that a deep model is no deeper than a flat one."""
        roots: dict[str, object] = {}
        for number, module in enumerate(self._modules):
            root = "model" if not number else type(module).__name__
            roots |= {f"{root}.{path}" if path else root: inner for path, inner in module.named_modules()}
        for module in self._modules:
            for name, parameter in module.named_parameters():
                hooks = gradient_hooks(parameter)
                roots |= {f"{name}.hook": hooks} if hooks else {}
        functions = chain.from_iterable(map(functions_in, self._schedulers))
        roots |= {f"scheduler {n}" if n else "scheduler": each for n, each in enumerate(functions)}
        roots |= {name: thing for name, thing in self._handed.items() if data or not isinstance(thing, Dataset)}
        return roots

    def _weights(self) -> Iterator[object]:
        """The tensors in the checkpoint, and schedulers."""
        for module in self._modules:
            yield from module.parameters()
            yield from module.buffers()
        for thing in self._others.values():
            if isinstance(thing, Optimizer):
                yield from (parameter for group in thing.param_groups for parameter in group["params"])
        yield from self._schedulers

    def _told(self) -> Iterator[object]:
        """Objects with a `state_dict`, and what that consists of."""
        for thing in (*self._found().values(), *self._given.values()):
            yield thing
            if isinstance(thing, nn.Module):
                yield from thing.parameters()
                yield from thing.buffers()
                if thing not in self._others.values():
                    yield from thing.modules()
            else:
                yield from getattr(thing, "__dict__", {}).values()


class Unsaved:
    """Names of state that training changes and no checkpoint holds, found by occasional looks.

    Each look also finds new generators.
    """

    def __init__(self, changes: Changes, extra: Mapping[str, object]) -> None:
        self._changes = changes
        self._extra = extra
        self._names: set[str] = set()
        self._began = time.perf_counter()
        changes.search()
        self._first = None if changes.is_lazy else changes.look(extra)
        self._spent = time.perf_counter() - self._began

    def names(self, *, surely: bool = False) -> list[str]:
        """All names so far; looks again within its share of the time, or in any case with `surely`."""
        now = time.perf_counter()
        if surely or self._spent < _FREE + _SHARE * (now - self._began):
            self._changes.search()
            seen = self._changes.look(self._extra)
            if self._first is None and not self._changes.is_lazy:
                self._first = seen  # PyTorch has turned lazy layers into others by now
            self._names |= set() if self._first is None else _outermost(self._first.changes(seen))
            self._spent += time.perf_counter() - now
        return sorted(self._names)


def _outermost(names: Iterable[str]) -> set[str]:
    """The outermost names: without unnamed entries of dicts, and without parts of others."""
    cut = {name.partition(".#")[0] for name in names}
    return {name for name in cut if not any(name.startswith(f"{other}.") for other in cut)}


def _is_record(value: Any) -> bool:
    """Whether an object holds plain values only, such as the settings of a model."""
    if isinstance(value, nn.Module | Tensor | type | FunctionType | Dataset | Optimizer | dict | list | set | deque):
        return False
    held = getattr(value, "__dict__", None)
    return isinstance(held, dict) and bool(held) and all(plain(each, LITTLE) is not None for each in held.values())


def _can_be_packed(thing: Any) -> bool:
    try:
        pack(thing.state_dict())
    except Exception:  # noqa: BLE001  # it is the person's, and was not meant for us
        return False
    return True


def _internals_of(owner: object) -> frozenset[str]:
    """Attributes that PyTorch keeps for itself."""
    if isinstance(owner, nn.Module):
        return _OF_MODULES
    return _of_optimizers() if isinstance(owner, Optimizer) else frozenset()


@cache
def _of_optimizers() -> frozenset[str]:
    """Attributes of every optimizer; its state_dict holds what matters of them."""
    names = frozenset(vars(torch.optim.SGD([torch.zeros(1)], 0.1)))
    return names | FUSED_NOTES | SCHEDULER_NOTES | {"step", "grad_scale", "found_inf"}


def _requires_grad(modules: Sequence[nn.Module]) -> dict[Key, bool]:
    return {key: parameter.requires_grad for key, parameter in _parameters(modules)}


def _parameters(modules: Sequence[nn.Module]) -> Iterator[tuple[Key, nn.Parameter]]:
    for number, module in enumerate(modules):
        for path, inner in module.named_modules():
            for name, parameter in parameters_of(inner).items():
                if parameter is not None:
                    yield (number, path, name), parameter


def _form(value: Any) -> Any:
    """A part of a scheduler's state for comparison; one with tensors counts as changed."""
    tensors, plain = pack(value)
    return object() if tensors else plain
