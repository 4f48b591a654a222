"""The `state_dict` of a loop for checkpoints, and how it is checked and loaded."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

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
from hotloop.step.sharding import optimizer_sharded, sharded, whole
from hotloop.training.claims import (
    AS_IT_WAS,
    LOOP,
    OptimizerForm,
    check_module,
    check_optimizer,
    check_random,
    check_scheduler,
    check_tensors,
    is_real,
    known_to,
    like,
    require,
    shapes_of,
    tells_plainly,
)
from hotloop.training.core import Core
from hotloop.training.part import all_or_nothing
from hotloop.training.schedulers import parts_of_scheduler
from hotloop.tune.plans import ASKED, possible
from hotloop.values.attributes import stored_by
from hotloop.values.rng import RngStates, with_arrays
from hotloop.values.snapshot import Snapshot

FORMAT = 4


def state_of(core: Core, *, gather: bool = False) -> dict[str, Any]:
    """Everything that training resumes from, but the position of the loader; no synchronization.

    FSDP's shards stay sharded, or are gathered by `gather`, a collective call.
    """
    tuning = core.tuner.tuning
    modules = modules_of(core)
    told = whole if gather else (lambda tree: tree)
    with told_as_planned():
        optimizers = [told(optimizer.state_dict()) for optimizer in core.subject.optimizers]
    return {
        "format": FORMAT,
        "model": told(modules[0].state_dict()),
        "others": [module.state_dict() for module in modules[1:]],
        "loose": _loose(core),
        "buffers": [_unsaved(module) for module in modules],
        "optimizers": optimizers,
        "held": _held(core),
        "schedulers": [scheduler.state_dict() for scheduler in core.schedule.schedulers],
        "kinds": _kinds(core.schedule.schedulers),
        "update": core.switch.step.state_dict(),
        "portion": core.switch.memory.portion.state_dict(),
        "watch": core.watch.state_dict(),
        "random": RngStates(core.subject.device).state_dict(),
        "epoch": core.data.epoch,
        "plan": core.switch.step.plan.to_json(),
        "tuning": None if tuning is None else tuning.to_json(),
        "considered": core.tuner.considered_for,
    }


@dataclass(frozen=True)
class Form:
    """What a script builds before it loads a state: the form that a state must have to be loaded."""

    modules: list[tuple[str, dict[str, str]]]  # the model first: its name in words, and the shapes of its tensors
    loose: dict[str, str]
    held: list[dict[str, Any]]
    optimizers: list[OptimizerForm]
    kinds: list[str]  # of the schedulers
    schedulers: list[tuple[type, dict[str, Any]]]
    scalers: dict[str, Any]
    random: dict[str, Any]

    @classmethod
    def of(cls, core: Core) -> Self:
        modules, schedulers = modules_of(core), core.schedule.schedulers
        names = ["model", *(type(module).__name__ for module in modules[1:])]
        with told_as_planned():
            optimizers = [OptimizerForm.of(optimizer) for optimizer in core.subject.optimizers]
        return cls(
            modules=[(name, shapes_of(module.state_dict())) for name, module in zip(names, modules, strict=True)],
            loose=shapes_of(_numbered(_loose(core))),
            held=_held(core),
            optimizers=optimizers,
            kinds=_kinds(schedulers),
            schedulers=[(type(each), dict(each.state_dict())) for each in schedulers],
            scalers=core.switch.step.state_dict()["scalers"],
            random=RngStates(core.subject.device).state_dict(),
        )


def kept_settings(core: Core, state: Mapping[str, Any]) -> list[str]:
    """Settings of optimizers that differ between state and script, where the state's win; not those of a schedule."""
    scheduled = ("lr", "momentum", "betas") if core.schedule.schedulers else ()
    found = [
        f"{key}={there}, and not {here}"
        for optimizer, values in zip(core.subject.optimizers, state["optimizers"], strict=True)
        if tells_plainly(optimizer)
        for group, saved in zip(optimizer.param_groups, values["param_groups"], strict=True)
        for key in optimizer.defaults.keys() & saved.keys() - {*FLAGS, *scheduled}
        if (here := _plain_setting(group[key])) != (there := _plain_setting(saved[key]))
    ]
    return sorted(set(found))


def _plain_setting(value: Any) -> Any:
    """A setting without the rounding of a tensor that may hold it."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain_setting, value))
    return float(f"{float(value):.6g}") if is_real(value) and type(value) is not int else value


def load_state(core: Core, state: dict[str, Any]) -> None:
    """Load a state into a core and the objects of `stateful=`; all of it or nothing."""
    with all_or_nothing() as undo:
        if isinstance(random := state.get("random"), Mapping):
            arrays = {name: with_arrays(each) if name == "numpy" else each for name, each in random.items()}
            state = {**state, "random": arrays}
        check_format(state)
        check(Form.of(core), state)
        stateful, others = core.stateful, state.get("stateful", {})
        if not isinstance(others, Mapping) or others.keys() != stateful.keys():
            names = ", ".join(map(printable, others)) if isinstance(others, Mapping) and others else "nothing"
            here = ", ".join(stateful) or "nothing"
            raise BadArgument(f"the state has stateful={{{names}}}, and this loop {{{here}}}", fix=AS_IT_WAS)
        load_progress(core, state, undo)
        core.watch.load_state_dict(state["watch"])
        for name, thing in stateful.items():
            undo.callback(thing.load_state_dict, copy.deepcopy(thing.state_dict()))
            thing.load_state_dict(others[name])
        load_tensors(core, state, undo)
    load_rng_states(core, state)


def load_progress(core: Core, state: dict[str, Any], undo: ExitStack) -> None:
    """Load everything but the weights: optimizers, schedulers, counts, the plan."""
    schedule, portion, watch = core.schedule, core.switch.memory.portion, core.watch
    undo.callback(partial(setattr, core.data, "epoch", core.data.epoch))
    undo.callback(partial(vars(watch).update, dict(vars(watch))))
    undo.callback(partial(portion.load_state_dict, portion.state_dict()))
    counts = core.switch.step.state_dict()
    undo.callback(lambda: core.switch.step.load_state_dict(counts))
    undo.callback(_plan_restorer(core))
    undo.callback(_optimizer_restorer(core))
    with core.switch.unplanned():
        for optimizer, values in zip(core.subject.optimizers, state["optimizers"], strict=True):
            with _own_flags(optimizer):
                optimizer.load_state_dict(optimizer_sharded(optimizer, _with_own_settings(optimizer, values)))
            if schedule.schedulers and state["update"]["steps"]:
                mark_stepped(optimizer)
        for scheduler, values in zip(schedule.schedulers, state["schedulers"], strict=True):
            known = known_to(scheduler, scheduler.state_dict(), values)
            scheduler.load_state_dict({name: values[name] for name in known})
    _load_plan(core, state)
    core.switch.step.load_state_dict(state["update"])
    portion.load_state_dict(state["portion"])
    core.data.epoch = state["epoch"]


def load_tensors(core: Core, state: dict[str, Any], undo: ExitStack) -> list[str]:
    """Load parameters and buffers, whose shapes were checked; only a person's own `set_extra_state` may still raise.

    Returns names of buffers of another shape, and of what the hooks of a module left out of its state.
    """
    modules, missing = modules_of(core), list[str]()
    with core.switch.unplanned():
        for module, values in zip(modules, [state["model"], *state["others"]], strict=True):
            if has_extra_state(values):
                undo.callback(partial(module.load_state_dict, copy.deepcopy(module.state_dict())))
            if _names_in(module) != values.keys():  # then it may be refused
                tensors = (each for each in (*module.parameters(), *module.buffers()) if not is_lazy(each))
                undo.callback(Snapshot().values(tensors).restore)
            missing += load_module(module, sharded(module, values))
        with torch.no_grad():
            for parameter, value in zip(_loose(core), state["loose"], strict=True):
                parameter.copy_(value)
        for module, values in zip(modules, state["buffers"], strict=True):
            missing += _load_buffers(module, values, core.subject.device)
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


def _plan_restorer(core: Core) -> Callable[[], None]:
    """A callable that restores the present plan."""
    plan, plans, noted, tuner = (
        core.switch.step.plan,
        list(core.switch.plans),
        core.switch.noted,
        dict(vars(core.tuner)),
    )

    def restore() -> None:
        if core.switch.step.plan != plan:
            core.switch.exchange(core.switch.step_for(plan), "that of before")
        core.switch.plans[:], core.switch.noted = plans, noted
        vars(core.tuner).update(tuner)

    return restore


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


def _with_own_settings(optimizer: Optimizer, values: dict[str, Any]) -> dict[str, Any]:
    """A state whose groups have every setting of this version of PyTorch."""
    if not tells_plainly(optimizer):
        return values
    pairs = zip(optimizer.param_groups, values["param_groups"], strict=True)
    return {**values, "param_groups": [{**group, **saved, "params": saved["params"]} for group, saved in pairs]}


def load_rng_states(core: Core, state: dict[str, Any]) -> None:
    """Set the rng states; last, because loading the rest may draw random numbers."""
    RngStates.from_state_dict(state["random"], core.subject.device).restore()


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


def handed_to(core: Core, transform: object, makers: Mapping[str, object]) -> dict[str, object]:
    """What else a run was given that may hold state, by name: loss, optimizers, transform, `makers`."""
    things: dict[str, object] = {}
    if core.criterion is not None:
        things["loss"] = core.criterion
    else:
        several = len(core.subject.objectives) > 1
        things |= {
            f"objective {each.name}" if several else "objective": each.objective for each in core.subject.objectives
        }
    several = len(core.subject.optimizers) > 1
    things |= {f"optimizer {n}" if several else "optimizer": o for n, o in enumerate(core.subject.optimizers, 1)}
    things |= {"device_transform": transform, **makers}
    return {name: thing for name, thing in things.items() if thing is not None}


def check_format(state: Mapping[str, Any]) -> None:
    """Raise for the state of another version."""
    if state.get("format") != FORMAT:
        raise BadArgument(
            f"the checkpoint has format {printable(str(state.get('format'))[:20])}, and this version reads {FORMAT}",
            fix="use the version of hotloop that wrote it",
        )


def check(form: Form, state: dict[str, Any], *, tries: bool = True) -> None:
    """Raise for a state that does not fit what the script builds, or is damaged, before anything has changed."""
    require(LOOP, state, "loop")
    for name, values in (("model", state["model"]), *(("another module", each) for each in state["others"])):
        check_module(name, values)
    check_tensors(*form.modules[0], state["model"])
    _check_count("modules with weights beside the model", len(form.modules) - 1, len(state["others"]))
    for (name, shapes), values in zip(form.modules[1:], state["others"], strict=True):
        check_tensors(name, shapes, values)
    check_tensors("set of parameters without a module", form.loose, _numbered(state["loose"]))
    _check_count("sets of buffers", len(form.modules), len(state["buffers"]))
    _check_optimizers(form.held, state["held"])
    _check_count("states of optimizers", len(form.optimizers), len(state["optimizers"]))
    for optimizer, values in zip(form.optimizers, state["optimizers"], strict=True):
        check_optimizer(optimizer, values, tries=tries)
    mine, theirs = form.kinds, state["kinds"]
    _check_count("schedulers", len(mine), len(theirs))
    if mine != theirs:
        raise BadArgument(f"the checkpoint has the schedulers {theirs}, and this loop {mine}", fix=AS_IT_WAS)
    _check_count("states of schedulers", len(mine), len(state["schedulers"]))
    for scheduler, values in zip(form.schedulers, state["schedulers"], strict=True):
        check_scheduler(*scheduler, values)
    for name in form.scalers.keys() & state["update"]["scalers"].keys():
        require(like(form.scalers[name]), state["update"]["scalers"][name], f"the scaler of {name}")
    check_random(form.random, state["random"], "random")


def modules_of(core: Core) -> list[nn.Module]:
    """The model, and other modules with weights: a criterion, objectives that are modules."""
    objectives = [each.objective for each in core.subject.objectives]
    found = [*core.subject.modules, *(each for each in objectives if isinstance(each, nn.Module))]
    return list(dict.fromkeys(found))


def _load_plan(core: Core, state: dict[str, Any]) -> None:
    """Resume the plan of the state where the loop chooses its plan; settings that the person asks for now win."""
    plan, now = Plan.from_json(state["plan"]), core.subject.plan
    if torch.device(plan.device).type != core.subject.device.type or not core.switch.plans_itself:
        return
    tuning = None if state["tuning"] is None else Tuning.from_json(state["tuning"])
    core.tuner.resume(tuning, state["considered"])
    asked = {name: getattr(now, name) for name in ASKED}
    if not core.subject.pinned_precision:
        del asked["precision"]
    core.switch.resume_plan(possible(replace(plan, **asked), core.subject))


def is_shaped(core: Core) -> bool:
    """Whether no layer is lazy: the first batch decides the shapes of lazy ones."""
    return not any(is_lazy(parameter) for module in modules_of(core) for parameter in module.parameters())


def _loose(core: Core) -> list[Tensor]:
    """Parameters of an optimizer that belong to no module."""
    owned = {id(parameter) for module in modules_of(core) for parameter in module.parameters()}
    held = [parameter for each in core.subject.objectives for parameter in each.parameters]
    return [parameter for parameter in dict.fromkeys(held) if id(parameter) not in owned]


def weights_of(core: Core) -> dict[str, Tensor]:
    """What all ranks have the same of once the first step has shared it, by name: weights that are trained or used."""
    names = {id(p): name for module in modules_of(core)[::-1] for name, p in module.named_parameters()}
    trained = (parameter for each in core.subject.objectives for parameter in each.parameters)
    several = dict.fromkeys([*core.subject.model.parameters(), *trained]) if core.switch.step.counts.steps else {}
    return {names.get(id(p), f"parameter {n}"): p for n, p in enumerate(several) if not is_lazy(p)}


def _unsaved(module: nn.Module) -> dict[str, Tensor | None]:
    """Non-persistent buffers, which a state_dict leaves out though training may change them."""
    return {
        _joined(path, name): buffer
        for path, inner in module.named_modules()
        for name, buffer in buffers_of(inner).items()
        if name in unsaved_buffers_of(inner)
    }


@torch.no_grad()
def _load_buffers(module: nn.Module, values: Mapping[str, Tensor | None], device: torch.device) -> list[str]:
    """Load non-persistent buffers; returns the names of those whose shape differs and that no code here assigns."""
    missing = []
    for path, inner in module.named_modules():
        for name, buffer in buffers_of(inner).items():
            if _joined(path, name) not in values:
                continue
            value = values[_joined(path, name)]
            if buffer is not None and value is not None and (value.shape, value.dtype) == (buffer.shape, buffer.dtype):
                buffer.copy_(value)
            elif value is None and buffer is None:
                continue
            elif name in stored_by(type(inner).__mro__):
                buffers_of(inner)[name] = None if value is None else value.to(device)  # it comes, goes or grows
            else:
                missing.append(_joined(path, name))
    return missing


@contextmanager
def _own_flags(optimizer: Optimizer) -> Iterator[None]:
    """Keep the flags that the optimizer was made with while a state is loaded."""
    before = [{flag: group[flag] for flag in FLAGS if flag in group} for group in optimizer.param_groups]
    yield
    for group, flags in zip(optimizer.param_groups, before, strict=True):
        group.update(flags)


def _held(core: Core) -> list[dict[str, Any]]:
    """Type and parameter names of each optimizer: PyTorch's state identifies parameters by their order alone."""
    names = {id(p): name for module in modules_of(core)[::-1] for name, p in module.named_parameters()}
    return [
        {
            "kind": type(optimizer).__name__,
            "groups": [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups],
        }
        for optimizer in core.subject.optimizers
    ]


def _kinds(schedulers: Sequence[object]) -> list[str]:
    return [type(scheduler).__name__ for scheduler in schedulers]


def _check_optimizers(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    _check_count("optimizers", len(mine), len(theirs))
    for number, (here, there) in enumerate(zip(mine, theirs, strict=True), 1):
        which = "the optimizer" if len(mine) == 1 else f"optimizer {number}"
        if here["kind"] != there["kind"]:
            raise BadArgument(f"{which} is {here['kind']} here and {there['kind']} in the checkpoint", fix=AS_IT_WAS)
        if [len(group) for group in here["groups"]] != [len(group) for group in there["groups"]]:
            sizes = [" + ".join(str(len(group)) for group in each["groups"]) for each in (here, there)]
            raise BadArgument(
                f"{which} has groups of {sizes[0]} parameters here and of {sizes[1]} in the checkpoint",
                fix=AS_IT_WAS,
            )
        for group, other in zip(here["groups"], there["groups"], strict=True):
            differ = [f"{a or 'one without a name'} for {b}" for a, b in zip(group, other, strict=True) if a != b]
            if differ:
                raise BadArgument(
                    f"{which} holds its parameters in another order than in the checkpoint: {shorten(differ, 3)}",
                    fix=AS_IT_WAS,
                )


def _check_count(what: str, here: int, there: int) -> None:
    if here != there:
        raise BadArgument(f"the checkpoint has {there} {what}, and this loop has {here}", fix=AS_IT_WAS)


def _numbered(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"number {number}": tensor for number, tensor in enumerate(tensors, 1)}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
