"""The state of a loop: what a checkpoint holds of its weights, optimizers, plan, counts, losses and rng states."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hotloop._torch import buffers_of, has_extra_state, mark_stepped, unsaved_buffers_of
from hotloop.data.loader_rng import is_stateful
from hotloop.errors import BadArgument
from hotloop.levers.flags import FLAGS, told_as_planned
from hotloop.plan import Plan, Tuning
from hotloop.printing.text import an, printable, shorten
from hotloop.records import Record
from hotloop.run.checks import (
    AS_IT_WAS,
    OptimizerForm,
    check_count,
    check_module,
    check_tensors,
    has_own_state_dict,
    is_alike,
    is_plain,
    is_real,
    is_state_of_generator,
    require,
    shapes_of,
)
from hotloop.run.core import Core
from hotloop.run.schedulers import parts_of_scheduler
from hotloop.step.sharding import optimizer_sharded, sharded
from hotloop.tune.plans import ASKED, possible
from hotloop.values.rng import RngStates, with_arrays
from hotloop.values.saved import Count, HasState, Saved, load_objects
from hotloop.values.snapshot import Snapshot

FORMAT = 5


class LoopState(HasState):
    """Everything that training resumes from, but the position of the loader, by its owners; no synchronization.

    Made before training, which may change what the script has built and a state must fit. FSDP's shards stay sharded.
    """

    name = "loop"
    format: Saved[int]
    update: Saved[dict[str, Any]]
    portion: Saved[dict[str, Any]]
    watch: Saved[dict[str, Any]]

    def __init__(self, core: Core) -> None:
        self._core = core
        self._weights = ModelState(core)  # the first: where its state is taken, FSDP has all shards in their places
        self._optimization, self._stateful = Optimization(core), Stateful(core)
        # In the order of loading.
        self._owners = (GlobalRng(core), self._optimization, PlanState(core), self._stateful, self._weights)

    @property
    def _parts(self) -> dict[str, HasState]:
        """The objects of the loop that have state of their own; the step changes with the plan."""
        return {
            "update": self._core.switch.step.state,
            "portion": self._core.switch.memory.portion,
            "watch": self._core.watch,
        }

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"format": FORMAT}
        for owner in self._owners[::-1]:
            state |= owner.state_dict()
        return state | {name: part.state_dict() for name, part in self._parts.items()}

    def check(self, state: Mapping[str, Any]) -> None:
        if state.get("format") != FORMAT:
            raise BadArgument(
                f"the state has format {printable(str(state.get('format'))[:20])}, and this version reads {FORMAT}",
                fix="use the version of hotloop that wrote it",
            )
        super().check(state)
        for owner in self._owners[::-1]:  # that it is another model tells most
            owner.check(state)
        for name, part in self._parts.items():
            part.check(state[name])

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        for owner in self._owners:
            owner.load(state, undo)
        for name, part in self._parts.items():
            part.load(state[name], undo)

    def load_weights(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        for owner in self._owners:
            owner.load_weights(state, undo)

    def after_load(self, state: Mapping[str, Any]) -> None:
        for owner in self._owners:
            owner.after_load(state)

    @property
    def missing(self) -> list[str]:
        """Names of what was only here, or only in the state that was loaded."""
        return [*self._stateful.missing, *self._weights.missing]

    def settings_kept(self, state: Mapping[str, Any]) -> list[str]:
        """Settings of optimizers that differ between state and script, where the state's win."""
        return self._optimization.settings_kept(state)


class GlobalRng(HasState):
    """The states of the global generators; loaded last, because loading the rest may draw."""

    name = "loop"
    random: Saved[dict[str, Any]]

    def __init__(self, core: Core) -> None:
        self._device = core.subject.device
        self._begun = RngStates(core.subject.device).state_dict()

    def state_dict(self) -> dict[str, Any]:
        return {"random": RngStates(self._device).state_dict()}

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        random = _with_arrays(state["random"])
        for kind in self._begun.keys() & random.keys():
            require(is_state_of_generator(self._begun[kind], random[kind]), f"loop.random.{kind}")

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        undo.callback(RngStates(self._device).restore)

    def load_weights(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        self.after_load(state)  # what is no state of a generator shows here

    def after_load(self, state: Mapping[str, Any]) -> None:
        RngStates.from_state_dict(_with_arrays(state["random"]), self._device).restore()


def _with_arrays(random: Mapping[str, Any]) -> dict[str, Any]:
    """Rng states as NumPy has them: those of `Loop.state_dict` have tensors in place of arrays."""
    return {name: with_arrays(each) if name == "numpy" else each for name, each in random.items()}


@dataclass(frozen=True)
class OptimizedNames(Record):
    """Type and parameter names of an optimizer: PyTorch's state identifies parameters by their order alone."""

    kind: str
    groups: list[list[str]]


class Optimization(HasState):
    """The optimizers, and the schedulers that change their settings."""

    name = "loop"
    optimizers: Saved[list[dict[str, Any]]]
    parameter_names: Saved[list[OptimizedNames]]
    schedulers: Saved[list[dict[str, Any]]]
    scheduler_types: Saved[list[str]]

    def __init__(self, core: Core) -> None:
        self._core, self._names = core, _parameter_names(core)
        with told_as_planned():
            self._forms = [OptimizerForm(optimizer) for optimizer in core.subject.optimizers]
        self._begun = [(type(each), dict(each.state_dict())) for each in core.schedule.schedulers]

    def state_dict(self) -> dict[str, Any]:
        schedulers = self._core.schedule.schedulers
        with told_as_planned():
            optimizers = [optimizer.state_dict() for optimizer in self._core.subject.optimizers]
        return {
            "optimizers": optimizers,
            "parameter_names": [each.to_json() for each in _parameter_names(self._core)],
            "schedulers": [scheduler.state_dict() for scheduler in schedulers],
            "scheduler_types": [type(scheduler).__name__ for scheduler in schedulers],
        }

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        _check_names(self._names, [OptimizedNames.from_json(each) for each in state["parameter_names"]])
        check_count("states of optimizers", len(self._forms), len(state["optimizers"]))
        for form, values in zip(self._forms, state["optimizers"], strict=True):
            form.check(values)
        mine, theirs = [kind.__name__ for kind, _ in self._begun], state["scheduler_types"]
        check_count("schedulers", len(mine), len(theirs))
        if mine != theirs:
            raise BadArgument(f"the checkpoint has the schedulers {theirs}, and this loop {mine}", fix=AS_IT_WAS)
        check_count("states of schedulers", len(mine), len(state["schedulers"]))
        for (kind, begun), values in zip(self._begun, state["schedulers"], strict=True):
            known = {key: values[key] for key in values if key in begun}
            lengths = kind.__module__.partition(".")[0] == "torch"  # the lists of others may grow
            require(is_alike(begun, known, words=False, lengths=lengths), kind.__name__)

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        core, schedulers = self._core, self._core.schedule.schedulers
        undo.callback(_optimizer_restorer(core))
        with core.switch.unplanned():
            for optimizer, values in zip(core.subject.optimizers, state["optimizers"], strict=True):
                with _own_flags(optimizer):
                    optimizer.load_state_dict(optimizer_sharded(optimizer, _with_own_settings(optimizer, values)))
                if schedulers and state["update"]["steps"]:
                    mark_stepped(optimizer)
            for scheduler, values in zip(schedulers, state["schedulers"], strict=True):
                now = scheduler.state_dict()  # unknown names are dropped, but for numbers that appear later
                known = {k: v for k, v in values.items() if k in now or (not hasattr(scheduler, k) and is_plain(v))}
                scheduler.load_state_dict(known)

    def settings_kept(self, state: Mapping[str, Any]) -> list[str]:
        """Settings of optimizers that differ between state and script, where the state's win; not a schedule's."""
        scheduled = ("lr", "momentum", "betas") if self._core.schedule.schedulers else ()
        found = [
            f"{key}={there}, and not {here}"
            for optimizer, values in zip(self._core.subject.optimizers, state["optimizers"], strict=True)
            if not has_own_state_dict(optimizer)
            for group, saved in zip(optimizer.param_groups, values["param_groups"], strict=True)
            for key in optimizer.defaults.keys() & saved.keys() - {*FLAGS, *scheduled}
            if (here := _plain_setting(group[key])) != (there := _plain_setting(saved[key]))
        ]
        return sorted(set(found))


def _parameter_names(core: Core) -> list[OptimizedNames]:
    names = {id(p): name for module in modules_of(core)[::-1] for name, p in module.named_parameters()}
    return [
        OptimizedNames(type(each).__name__, [[names.get(id(p), "") for p in g["params"]] for g in each.param_groups])
        for each in core.subject.optimizers
    ]


def _check_names(mine: list[OptimizedNames], theirs: list[OptimizedNames]) -> None:
    check_count("optimizers", len(mine), len(theirs))
    for number, (here, there) in enumerate(zip(mine, theirs, strict=True), 1):
        which = "the optimizer" if len(mine) == 1 else f"optimizer {number}"
        if here.kind != there.kind:
            raise BadArgument(f"{which} is {here.kind} here and {there.kind} in the checkpoint", fix=AS_IT_WAS)
        if [len(group) for group in here.groups] != [len(group) for group in there.groups]:
            sizes = [" + ".join(str(len(group)) for group in each.groups) for each in (here, there)]
            raise BadArgument(
                f"{which} has groups of {sizes[0]} parameters here and of {sizes[1]} in the checkpoint",
                fix=AS_IT_WAS,
            )
        for group, other in zip(here.groups, there.groups, strict=True):
            differ = [f"{a or 'one without a name'} for {b}" for a, b in zip(group, other, strict=True) if a != b]
            if differ:
                raise BadArgument(
                    f"{which} holds its parameters in another order than in the checkpoint: {shorten(differ, 3)}",
                    fix=AS_IT_WAS,
                )


def _plain_setting(value: Any) -> Any:
    """A setting without the rounding of a tensor that may hold it."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain_setting, value))
    return float(f"{float(value):.6g}") if is_real(value) and type(value) is not int else value


def _with_own_settings(optimizer: Optimizer, values: dict[str, Any]) -> dict[str, Any]:
    """A state whose groups have every setting of this version of PyTorch."""
    if has_own_state_dict(optimizer):
        return values
    pairs = zip(optimizer.param_groups, values["param_groups"], strict=True)
    return {**values, "param_groups": [{**group, **saved, "params": saved["params"]} for group, saved in pairs]}


@contextmanager
def _own_flags(optimizer: Optimizer) -> Iterator[None]:
    """Keep the flags that the optimizer was made with while a state is loaded."""
    before = [{flag: group[flag] for flag in FLAGS if flag in group} for group in optimizer.param_groups]
    yield
    for group, flags in zip(optimizer.param_groups, before, strict=True):
        group.update(flags)


def _optimizer_restorer(core: Core) -> Callable[[], None]:
    """A callable that restores the present state of optimizers and schedulers, which loading replaces whole."""
    with core.switch.unplanned():
        groups = [group for optimizer in core.subject.optimizers for group in optimizer.param_groups]
        parts = [part for scheduler in core.schedule.schedulers for part in parts_of_scheduler(scheduler)]
        before = Snapshot().items([*map(vars, [*core.subject.optimizers, *parts]), *groups])

    def restore() -> None:
        with core.switch.unplanned():
            before.restore()

    return restore


class Stateful(HasState):
    """What the person has handed over as `stateful=`."""

    name = "loop"
    stateful: Saved[dict[str, Any]]

    def __init__(self, core: Core) -> None:
        self._things = core.stateful
        self.missing: list[str] = []  # names that only this loop has

    def state_dict(self) -> dict[str, Any]:
        return {"stateful": {name: thing.state_dict() for name, thing in self._things.items()}}

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        saved = state["stateful"]
        if unknown := sorted(saved.keys() - self._things.keys()):
            raise BadArgument(
                f"the checkpoint holds the state of {shorten(unknown)}, and this loop was not given it",
                fix=f"pass it again: Loop(…, stateful={{{unknown[0]!r}: …}})",
            )
        for name, thing in self._things.items():
            if isinstance(thing, nn.Module) and name in saved:
                check_module(name, shapes_of(thing.state_dict()), saved[name])

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        self.missing = load_objects(self._things, state["stateful"], undo)


class PlanState(HasState):
    """The plan that was found, and the epoch of the data."""

    name = "loop"
    epoch: Saved[Count]
    plan: Saved[Plan]
    tuning: Saved[Tuning | None]
    considered: Saved[Count | None]

    def __init__(self, core: Core) -> None:
        self._core = core

    def state_dict(self) -> dict[str, Any]:
        core, tuning = self._core, self._core.tuner.record.tuning
        return {
            "epoch": core.data.epoch,
            "plan": core.switch.step.plan.to_json(),
            "tuning": None if tuning is None else tuning.to_json(),
            "considered": core.tuner.record.considered_for,
        }

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        """Resume the plan of the state where the loop chooses its plan; settings that the person asks for now win."""
        core = self._core
        undo.callback(core.tuner.restorer())
        undo.callback(core.switch.restorer())
        undo.callback(setattr, core.data, "epoch", core.data.epoch)
        plan, now = Plan.from_json(state["plan"]), core.subject.plan
        core.data.epoch = state["epoch"]
        if plan.device.split(":")[0] != core.subject.device.type or not core.switch.plans_itself:
            return
        tuning = None if state["tuning"] is None else Tuning.from_json(state["tuning"])
        core.tuner.resume(tuning, state["considered"])
        asked = {name: getattr(now, name) for name in ASKED}
        if not core.subject.pinned_precision:
            del asked["precision"]
        core.switch.resume_plan(possible(replace(plan, **asked), core.subject))


class ModelState(HasState):
    """Modules with weights, the model first, and parameters of an optimizer that belong to no module."""

    name = "loop"
    model: Saved[dict[str, Any]]
    others: Saved[list[dict[str, Any]]]
    loose: Saved[list[Tensor]]
    buffers: Saved[list[dict[str, Tensor | None]]]  # of each module, that a state_dict leaves out
    resized: Saved[list[str]]  # those of them that have come, gone or grown in training

    def __init__(self, core: Core) -> None:
        self._core = core
        modules = modules_of(core)
        self._names = ["model", *(type(module).__name__ for module in modules[1:])]
        self._shapes = [shapes_of(module.state_dict()) for module in modules]
        self._loose = shapes_of(_numbered(_loose(core)))
        self._buffers = self._shapes_of_buffers()
        self.missing: list[str] = []  # buffers of another shape, and what hooks of a module have left out of its state

    def state_dict(self) -> dict[str, Any]:
        modules, now = modules_of(self._core), self._shapes_of_buffers()
        return {
            "model": modules[0].state_dict(),
            "others": [module.state_dict() for module in modules[1:]],
            "loose": _loose(self._core),
            "buffers": [_unsaved_values(module) for module in modules],
            "resized": sorted(name for name in now if now[name] != self._buffers.get(name)),
        }

    def check(self, state: Mapping[str, Any]) -> None:
        super().check(state)
        check_module("model", self._shapes[0], state["model"])
        check_count("modules with weights beside the model", len(self._shapes) - 1, len(state["others"]))
        for name, shapes, values in zip(self._names[1:], self._shapes[1:], state["others"], strict=True):
            check_module(name, shapes, values)
        check_tensors("set of parameters without a module", self._loose, _numbered(state["loose"]))
        check_count("sets of buffers", len(self._shapes), len(state["buffers"]))

    def load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        """All of it is loaded later."""

    def load_weights(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        """Load parameters and buffers, whose shapes were checked; only a `set_extra_state` may still raise."""
        core, modules = self._core, modules_of(self._core)
        self.missing = []
        with core.switch.unplanned():
            for module, values in zip(modules, [state["model"], *state["others"]], strict=True):
                if has_extra_state(values):
                    undo.callback(partial(module.load_state_dict, copy.deepcopy(module.state_dict())))
                if _names_in(module) != values.keys():  # then it may be refused
                    tensors = (each for each in (*module.parameters(), *module.buffers()) if not is_lazy(each))
                    undo.callback(Snapshot().values(tensors).restore)
                self.missing += load_module(module, sharded(module, values))
            with torch.no_grad():
                for parameter, value in zip(_loose(core), state["loose"], strict=True):
                    parameter.copy_(value)
            for number, (module, values) in enumerate(zip(modules, state["buffers"], strict=True)):
                resized = {name for name in values if f"{number} {name}" in state["resized"]}
                self.missing += _load_buffers(module, values, resized, core.subject.device)

    def _shapes_of_buffers(self) -> dict[str, str]:
        every = (shapes_of(_unsaved_values(module)) for module in modules_of(self._core))
        return {f"{number} {name}": shape for number, shapes in enumerate(every) for name, shape in shapes.items()}


def _loose(core: Core) -> list[Tensor]:
    """Parameters of an optimizer that belong to no module."""
    owned = {id(parameter) for module in modules_of(core) for parameter in module.parameters()}
    held = [parameter for each in core.subject.objectives for parameter in each.parameters]
    return [parameter for parameter in dict.fromkeys(held) if id(parameter) not in owned]


def _numbered(tensors: list[Tensor]) -> dict[str, Tensor]:
    return {f"number {number}": tensor for number, tensor in enumerate(tensors, 1)}


def _unsaved(module: nn.Module) -> dict[str, tuple[dict[str, Tensor | None], str]]:
    """Non-persistent buffers, which a state_dict leaves out though training may change them: where each is held."""
    return {
        f"{path}.{name}" if path else name: (buffers_of(inner), name)
        for path, inner in module.named_modules()
        for name in buffers_of(inner)
        if name in unsaved_buffers_of(inner)
    }


def _unsaved_values(module: nn.Module) -> dict[str, Tensor | None]:
    return {full: table[name] for full, (table, name) in _unsaved(module).items()}


@torch.no_grad()
def _load_buffers(
    module: nn.Module, values: Mapping[str, Tensor | None], resized: set[str], device: torch.device
) -> list[str]:
    """Load non-persistent buffers; returns the names of those whose shape differs and was not changed in training."""
    missing = []
    for full, (table, name) in _unsaved(module).items():
        buffer, value = table[name], values.get(full)
        if full not in values or value is buffer:
            continue
        if buffer is not None and value is not None and (value.shape, value.dtype) == (buffer.shape, buffer.dtype):
            buffer.copy_(value)
        elif full in resized:
            table[name] = None if value is None else value.to(device)
        else:
            missing.append(full)
    return missing


def _names_in(module: nn.Module) -> set[str]:
    """The keys of a state_dict without hooks."""
    parameters = (name for name, _ in module.named_parameters(remove_duplicate=False))
    buffers = (name for name, _ in module.named_buffers(remove_duplicate=False))
    return {*parameters, *buffers} - _unsaved(module).keys()


def load_module(module: nn.Module, values: Mapping[str, Any]) -> list[str]:
    """Load a module's state_dict; returns the names that hooks left out of it, which must be frozen."""
    try:
        module.load_state_dict(values)
    except RuntimeError as error:
        missing, unexpected = module.load_state_dict(values, strict=False)
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        if names := [*unexpected, *(name for name in missing if name in trained)]:
            raise BadArgument(
                f"the state of {type(module).__name__} and its load_state_dict differ in {shorten(names, 6)}",
                fix="hooks of state_dict may leave out only frozen weights, and must keep the names",
            ) from error
        return list(missing)
    return []


def checked_stateful(stateful: object) -> dict[str, Any]:
    """The objects of `stateful=`, by name; raises where one has no `state_dict`."""
    if stateful is None:
        return {}
    if not isinstance(stateful, Mapping) or not all(isinstance(name, str) for name in stateful):
        raise BadArgument(f"stateful is {an(type(stateful).__name__)}", fix='give names: stateful={"ema": ema}')
    for name, thing in stateful.items():
        if not is_stateful(thing) or isinstance(thing, type):
            raise BadArgument(
                f"stateful[{name!r}] is {an(type(thing).__name__)}, which has no state_dict and load_state_dict",
                fix="give an object with both: a module, an AveragedModel, a class of your own",
            )
    return dict(stateful)


def modules_of(core: Core) -> list[nn.Module]:
    """The model, and other modules with weights: a criterion, objectives that are modules."""
    objectives = [each.objective for each in core.subject.objectives]
    found = [*core.subject.modules, *(each for each in objectives if isinstance(each, nn.Module))]
    return list(dict.fromkeys(found))


def is_shaped(core: Core) -> bool:
    """Whether no layer is lazy: the first batch decides the shapes of lazy ones."""
    return not any(is_lazy(parameter) for module in modules_of(core) for parameter in module.parameters())


def weights_of(core: Core) -> dict[str, Tensor]:
    """What all ranks have the same of once the first step has shared it, by name: weights that are trained or used."""
    names = {id(p): name for module in modules_of(core)[::-1] for name, p in module.named_parameters()}
    trained = (parameter for each in core.subject.objectives for parameter in each.parameters)
    several = dict.fromkeys([*core.subject.model.parameters(), *trained]) if core.switch.step.counts.steps else {}
    return {names.get(id(p), f"parameter {n}"): p for n, p in enumerate(several) if not is_lazy(p)}
