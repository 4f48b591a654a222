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
from hotloop.run.checks import check_sharing
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
from hotloop.values.rng import Generator
from hotloop.values.saved import HasState, Saved
from hotloop.values.snapshot import owned_tensors

Where = tuple[int | str, str]  # the number or name of an object, and the path of a module inside it
Key = tuple[int | str, str, str]  # the same, and an attribute
_OF_MODULES = (OF_MODULES | {HOOKS_INSTALLED}) - {"training"}  # attributes that PyTorch keeps for itself
_MADE = ("lr_lambdas", SCHEDULERS)  # entries of a scheduler's state that are not its attributes
_SHARE, _FREE = 0.01, 0.2  # of the time of a run and, in seconds, besides that: for looks at what no checkpoint holds


class RunObjects:
    """The objects of a run that may hold state, and what of it is saved: plain attributes and `state_dict`s."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        schedulers: Sequence[LRScheduler],
        handed: Mapping[str, object],
        stateful: Mapping[str, Any],
        known: Sequence[object],
    ) -> None:
        """`handed` to the run, by name; `stateful`: to be saved; `known`: saved elsewhere, as loaders are."""
        self.modules, self.schedulers, self.stateful = modules, schedulers, stateful
        self._handed, self._known = handed, known
        self.generators: dict[str, Generator] = {}  # by the path on which each was reached
        inside = {id(inner) for module in modules for inner in module.modules()}
        owners = {name: owner_of(thing) for name, thing in handed.items()}
        self.others = {name: each for name, each in owners.items() if id(each) not in inside and not is_ours(each)}

    @property
    def is_lazy(self) -> bool:
        """Whether there are lazy layers, which the first batch replaces; weights that are loaded only shape them."""
        return any(isinstance(inner, LazyModuleMixin) for module in self.modules for inner in module.modules())

    def with_state(self) -> dict[str, Any]:
        """Objects with a `state_dict` that a checkpoint can hold."""
        told = {n: t for n, t in self.others.items() if is_stateful(t) and not isinstance(t, Optimizer)}
        return {name: thing for name, thing in told.items() if _can_be_packed(thing)}

    def owners(self) -> Iterator[tuple[Where, Any, int]]:
        """All objects whose attributes are saved, and the most bytes of one attribute."""
        known = {id(each) for each in self._known}
        for (root, path), owner, room in self._holders():
            yield (root, path), owner, room
            for name, value in list(vars(owner).items()):
                if id(value) not in known and _is_record(value):
                    yield (root, f"{path}<{name}>"), value, room

    def attributes(self) -> Iterator[tuple[Key, Any, PlainValue]]:
        """Attributes with plain values, which may change in training, and whether parameters require gradients."""
        for where, owner, room in self.owners():
            own = _internals_of(owner)
            for name, value in vars(owner).items():
                if name not in own and (parts := plain(value, room)) is not None:
                    yield (*where, name), owner, parts
        for number, module in enumerate(self.modules):
            for path, inner in module.named_modules():
                for name, parameter in parameters_of(inner).items():
                    if parameter is not None:
                        yield (number, path, name), parameter, PlainValue(parameter.requires_grad)

    def search(self) -> None:
        """Find the generators reachable from the objects, except the loader's own."""
        self.generators = self._reached(self._roots(data=False)).generators

    def look(self, extra: Mapping[str, object]) -> ReachableState:
        """Everything reachable that is not in the checkpoint; from `extra` too."""
        seen = self._reached({**self._roots(data=True), **extra}, self._parts_with_state(), extra.values())
        for path in seen.generators:
            seen.values.pop(path, None)
        return seen

    def _holders(self) -> Iterator[tuple[Where, Any, int]]:
        roots: dict[int | str, nn.Module] = dict(enumerate(self.modules))
        told = self.with_state()
        for name, thing in self.others.items():
            if isinstance(thing, nn.Module):
                roots[name] = thing
            elif name not in told and isinstance(getattr(thing, "__dict__", None), dict):
                yield (name, ""), thing, LITTLE if isinstance(thing, Dataset) else ROOM
        for root, module in roots.items():
            for path, inner in module.named_modules():
                yield (root, path), inner, ROOM

    def _reached(
        self, roots: Mapping[str, object], known: Iterable[object] = (), more: Iterable[object] = ()
    ) -> ReachableState:
        """Everything reachable, except attributes in the checkpoint, those of `more` among them."""
        holders = {id(owner): room for _, owner, room in self.owners()} | {id(owner): ROOM for owner in more}

        def holds(owner: object, name: str, value: object) -> bool:
            if isinstance(owner, Optimizer) and name in _of_optimizers():
                return not name.endswith("_hooks")
            room = holders.get(id(owner))
            if room is None:
                return False
            if isinstance(owner, nn.Module) and name in _OF_MODULES:
                return name in (PARAMETERS, BUFFERS) or installed_once(name, value)
            return plain(value, room) is not None or (isinstance(value, Tensor) and value.grad_fn is not None)

        return look(roots, holds, chain(known, self._known, self._weights()))

    def _roots(self, *, data: bool) -> dict[str, object]:
        """The roots of a look, by name; each module is one, so that a deep model is no deeper than a flat one."""
        roots: dict[str, object] = {}
        for number, module in enumerate(self.modules):
            root = "model" if not number else type(module).__name__
            roots |= {f"{root}.{path}" if path else root: inner for path, inner in module.named_modules()}
        for module in self.modules:
            for name, parameter in module.named_parameters():
                hooks = gradient_hooks(parameter)
                roots |= {f"{name}.hook": hooks} if hooks else {}
        functions = chain.from_iterable(map(functions_in, self.schedulers))
        roots |= {f"scheduler {n}" if n else "scheduler": each for n, each in enumerate(functions)}
        roots |= {name: thing for name, thing in self._handed.items() if data or not isinstance(thing, Dataset)}
        return roots

    def _weights(self) -> Iterator[object]:
        """The tensors in the checkpoint, and schedulers."""
        yield from owned_tensors(self.modules, [each for each in self.others.values() if isinstance(each, Optimizer)])
        yield from self.schedulers

    def _parts_with_state(self) -> Iterator[object]:
        """Objects with a `state_dict`, and what that consists of."""
        for thing in (*self.with_state().values(), *self.stateful.values()):
            yield thing
            if isinstance(thing, nn.Module):
                yield from owned_tensors([thing], [])
                if thing not in self.others.values():
                    yield from thing.modules()
            else:
                yield from getattr(thing, "__dict__", {}).values()


class AttributeChanges(HasState):
    """Compares the attributes of a run's objects with what they were when it began."""

    name = "python_state"
    attributes: Saved[dict[Key, Any]]  # that changed
    devices: Saved[dict[Key, list[str]]]  # of the tensors in each
    device: Saved[str]
    requires_grad: Saved[dict[Key, bool]]  # of parameters where it changed

    def __init__(self, objects: RunObjects, device: torch.device) -> None:
        self._objects, self._device = objects, device
        self._begun = self._now()
        self._left: dict[Key, ValueSnapshot] | None = None  # at the end of the last part of the run
        self._known: set[Key] = set()  # changed in an earlier part of the run

    def hand(self, objects: RunObjects) -> None:
        """Take the objects of the next part of the run in the same loop, which may be others."""
        before, self._objects = self._objects.others, objects
        new = {name for name, thing in objects.others.items() if before.get(name) is not thing}
        self._begun = {key: mark for key, mark in self._begun.items() if key[0] not in new}
        self._begun |= {key: mark for key, mark in self._now().items() if key[0] in new}
        if self._left is not None:
            self._left = {key: mark for key, mark in self._left.items() if key[0] not in new}

    def leave(self) -> None:
        """Note the state at the end of a part of the run: later differences were made by the person."""
        self._left = self._now()

    def state_dict(self) -> dict[str, Any]:
        """The values that changed, as plain data and tensors."""
        attributes: dict[Key, Any] = {}
        requires_grad: dict[Key, bool] = {}
        for key, owner, parts in self._objects.attributes():
            if key in self._known or key not in self._begun or not self._begun[key].fits(parts):
                changed = requires_grad if isinstance(owner, nn.Parameter) else attributes
                changed[key] = parts.whole()  # with containers of its own, for training goes on
        return {
            "attributes": attributes,
            "devices": {key: on for key, value in attributes.items() if (on := devices_of(value))},
            "device": self._device.type,
            "requires_grad": requires_grad,
        }

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        for key, kinds in state["devices"].items():
            if key not in state["attributes"] or len(kinds) != len(devices_of(state["attributes"][key])):
                raise unusable(f"python_state.devices{list(key)} are not those of its tensors")
        check_sharing(list(state["attributes"].values()), "python_state.attributes")

    def load_attributes(self, state: Mapping[str, Any]) -> list[str]:
        """Set what had changed; returns the names of attributes that could not be set."""
        self._undo()
        self._known = {*state["attributes"], *state["requires_grad"]}
        for key, parameter, _ in list(self._objects.attributes()):
            if isinstance(parameter, nn.Parameter) and key in state["requires_grad"]:
                parameter.requires_grad_(state["requires_grad"][key])
        owners = {where: owner for where, owner, _ in self._objects.owners()}
        restoring, missing, host = Restoring(), [], torch.device("cpu")
        for key, saved in state["attributes"].items():
            root, path, name = key
            owner = owners.get((root, path))
            now = None if owner is None else vars(owner).get(name)
            is_plain = owner is not None and name not in _internals_of(owner) and (now is None or plain(now))
            if not is_plain or not may_become(owner, name, saved):
                missing.append(".".join(filter(None, ("model" if root == 0 else str(root), path, name))))
                continue
            kinds = state["devices"].get(key, ())
            devices = (self._device if kind == state["device"] else host for kind in kinds)
            restoring.put(vars(owner), name, moved(saved, devices))
        return missing

    def _now(self) -> dict[Key, ValueSnapshot]:
        return {key: ValueSnapshot(parts) for key, _, parts in self._objects.attributes()}

    def _undo(self) -> None:
        """Restore the state of the beginning, except what the person has set since, where the same loop resumes."""
        if self._left is None:
            return
        restoring = Restoring()
        for key, owner, parts in list(self._objects.attributes()):
            begun, left = self._begun.get(key), self._left.get(key)
            if begun is None or left is None or not left.fits(parts):
                self._begun[key] = ValueSnapshot(parts)
            elif not begun.fits(parts) and (value := begun.value) is not LOST:
                if isinstance(owner, nn.Parameter):
                    owner.requires_grad_(value)
                else:
                    restoring.put(vars(owner), key[2], value)


class SchedulerChanges(HasState):
    """Tells the progress of schedulers, which a checkpoint brings, from their settings, which the script has."""

    name = "python_state"
    schedulers: Saved[list[list[str]]]  # names of what changed in the state of each

    def __init__(self, schedulers: Sequence[LRScheduler]) -> None:
        self._schedulers = schedulers
        self._settings = [dict(vars(scheduler)) for scheduler in schedulers]
        self._forms = [{k: _form(v) for k, v in scheduler.state_dict().items()} for scheduler in schedulers]
        self._changed: list[set[str]] = [set() for _ in schedulers]

    def state_dict(self) -> dict[str, Any]:
        for scheduler, before, changed in zip(self._schedulers, self._forms, self._changed, strict=True):
            changed |= {k for k, v in scheduler.state_dict().items() if k not in before or before[k] != _form(v)}
        return {"schedulers": [sorted(names) for names in self._changed]}

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        if len(state["schedulers"]) != len(self._schedulers):
            raise unusable("python_state.schedulers are not as many as the schedulers")

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        """Give schedulers, which have loaded a whole state, their settings from the script again."""
        undo.callback(setattr, self, "_changed", self._changed)
        self._changed = [set(names) for names in state["schedulers"]]
        for scheduler, settings, changed in zip(self._schedulers, self._settings, self._changed, strict=True):
            kept = scheduler.state_dict().keys() & settings.keys() - changed - set(_MADE)
            vars(scheduler).update({name: settings[name] for name in kept})


class Changes:
    """What lives as long as the loop: the beginning, with which its objects are compared."""

    def __init__(self, objects: RunObjects, device: torch.device) -> None:
        self.attributes = AttributeChanges(objects, device)
        self.schedulers = SchedulerChanges(objects.schedulers)


class Unsaved:
    """Names of state that training changes and no checkpoint holds, found by occasional looks.

    Each look also finds new generators.
    """

    def __init__(self, objects: RunObjects, extra: Mapping[str, object]) -> None:
        self._objects, self._extra = objects, extra
        self._names: set[str] = set()
        self._began = time.perf_counter()
        objects.search()
        self._first = None if objects.is_lazy else objects.look(extra)
        self._spent = time.perf_counter() - self._began

    def names(self, *, surely: bool = False) -> list[str]:
        """All names so far; looks again within its share of the time, or in any case with `surely`."""
        now = time.perf_counter()
        if surely or self._spent < _FREE + _SHARE * (now - self._began):
            self._objects.search()
            seen = self._objects.look(self._extra)
            if self._first is None and not self._objects.is_lazy:
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


def _form(value: Any) -> Any:
    """A part of a scheduler's state for comparison; one with tensors counts as changed."""
    tensors, plain = pack(value)
    return object() if tensors else plain
