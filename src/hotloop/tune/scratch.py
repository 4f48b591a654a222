"""`scratch`: real training steps from the present state of a loop, all of them undone at its end."""

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from hotloop._torch import buffers_of
from hotloop.data.loader_rng import is_stateful, loader_rng_restorer
from hotloop.data.origin import makers_of, owner_of
from hotloop.data.samplers import generators_of
from hotloop.errors import BadArgument, PlanWarning
from hotloop.memory.oom import clear
from hotloop.plan import Plan
from hotloop.printing.text import shorten
from hotloop.step.training import TrainingStep
from hotloop.tune.subject import Subject
from hotloop.values.reach import look
from hotloop.values.rng import RngStates, generators_in
from hotloop.values.snapshot import Snapshot
from hotloop.values.tree import tensors_in


@contextmanager
def scratch(
    subject: Subject,
    loaders: Mapping[str, object],
    transform: object = None,
    others: Sequence[Any] = (),
    known: Iterable[object] = (),
    batch: object = None,
) -> Iterator["Scratch"]:
    """Real steps that leave no trace, also after an error; warns with the names of what cannot be restored.

    The keys of `loaders` come before the names of their parts. Of `others`, such as hooks, the attributes are restored
    and their `state_dict`, and nobody looks further. What is `known` is not looked at.
    """
    handed = {"device_transform": transform}
    for prefix, loader in loaders.items():
        handed |= makers_of(loader, prefix) if isinstance(loader, DataLoader) else {f"{prefix}loader": loader}
    things = (*(each.objective for each in subject.objectives), *handed.values(), *others)
    owners = [getattr(thing, "__self__", owner_of(thing)) for thing in things]
    inner = {module for outer in subject.modules for module in outer.modules()}
    parts = (part for owner in owners for part in (owner, *_attributes(owner).values()))
    held = [part for part in parts if isinstance(part, nn.Module) and part not in inner]  # such as an AveragedModel
    subject = replace(subject, modules=[*subject.modules, *held])
    tensors = list({id(tensor): tensor for tensor in _written_tensors(subject)}.values())
    if any(map(is_lazy, tensors)):
        raise BadArgument(
            "the model has weights whose shape its first batch decides", fix="run one batch through the model first"
        )
    roots, skip, known = subject.roots(handed, batch), subject.restorable(), [*known, *tensors]
    before = look(roots, skip, known)
    holders = [*dict.fromkeys(module for outer in subject.modules for module in outer.modules()), *owners]
    generators = [*before.generators.values(), *generators_in(holders)]
    generators += (generator for loader in loaders.values() for generator in generators_of(loader))
    rngs = RngStates(subject.device, generators)
    rng_restorers = [rngs.restore, *(loader_rng_restorer(loader) for loader in loaders.values())]
    stateful = [thing for thing in others if is_stateful(thing) and not isinstance(thing, type)]
    states = [(thing, copy.deepcopy(thing.state_dict())) for thing in stateful]

    def lasting_changes() -> list[str]:
        return before.changes(look(roots, skip, known))

    try:
        with _gradients_on_host(tensors):
            values = [tensor.detach() for tensor in tensors if _is_written(tensor)]
            state = Snapshot.of(subject.modules, subject.optimizers).values(values, on_host=True)
            state.items(vars(optimizer) for optimizer in subject.optimizers)
            state.items(container for holder in holders for container in _containers_of(holder))
            space = Scratch(subject, state, rng_restorers, lasting_changes)
            try:
                yield space
            finally:
                space.end()
    finally:
        subject.backend.reset_peak_memory_stats()  # what is tried is no part of a run's peak
        for thing, told in states:
            thing.load_state_dict(told)
        if changed := lasting_changes():
            words = f"real steps have changed {shorten(changed, 4)}, which cannot be restored"
            warnings.warn(words, PlanWarning, stacklevel=5)


@dataclass(eq=False)
class Scratch:
    """Real steps of a loop in the model's own memory; `rewind` restores the state at the beginning.

    The copy of that state is on the host: on the device it would take memory that is to be measured.
    """

    subject: Subject
    state: Snapshot  # at the beginning, but for rng states
    rng_restorers: Sequence[Callable[[], None]]
    lasting_changes: Callable[[], list[str]]  # names of what steps have changed and `rewind` did not restore
    step: TrainingStep | None = None  # whose plan the model and the optimizers have the form of

    def exchange(self, step: TrainingStep | None) -> None:
        """Switch to another step: the weights keep their values, in the form of its plan."""
        old, self.step = self.step, step
        if step is not old:
            if step is not None and old is not None:
                step.take_over(old)
            self.subject.exchange(old, step)
        if step is not None and not self.subject.model.training:
            self.subject.model.train()

    def rewind(self) -> None:
        """Restore the state at the beginning, without gradients. Earlier CUDA graphs may read freed memory."""
        now = self.step
        self.exchange(None)
        self.state.restore()
        self.rewind_rng()
        self.exchange(now)

    def rewind_rng(self) -> None:
        """Restore the rng states at the beginning, those of the loaders included, and no other state."""
        for restore in self.rng_restorers:
            restore()

    def end(self) -> None:
        """Restore everything, to the bit."""
        self.exchange(None)
        self.rewind()
        clear(self.subject.device)

    @contextmanager
    def eager_step(self, plan: Plan) -> Iterator[TrainingStep]:
        """The step of a plan, neither compiled nor captured; the state is rewound before and after the block."""
        # From the second batch of a window on, gradients are there in the forward pass: two show all there is to see.
        windows = min(plan.accumulate, 2)
        plan = replace(plan, compile="off", graph=0, micro_batch=None, accumulate=windows)
        self.rewind()
        step = self.subject.step_for(plan)
        self.exchange(step)
        try:
            yield step
        finally:
            self.exchange(None)
            self.rewind()


@contextmanager
def _gradients_on_host(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Move the gradients that wait for their update to the host, where they take no memory that is measured."""
    waiting = [t for t in tensors if t.is_leaf and t.grad is not None]
    gradients = [t.grad.cpu() for t in waiting if t.grad is not None]
    try:
        for tensor in waiting:
            tensor.grad = None
        yield
    finally:
        for tensor, gradient in zip(waiting, gradients, strict=True):
            tensor.grad = gradient.to(tensor.device)


def _attributes(owner: object) -> dict[str, Any]:
    held = None if isinstance(owner, ModuleType | type) else getattr(owner, "__dict__", None)
    return held if isinstance(held, dict) else {}


def _containers_of(owner: object) -> Iterator[Any]:
    """The containers of an object's attributes; not deeper ones, which may hold a million items of data."""
    held = _attributes(owner)
    # A mapping of another kind may be a file, such as one of h5py.
    return (each for each in (owner, held, *held.values()) if isinstance(each, list | dict | set | deque))


def _written_tensors(subject: Subject) -> Iterator[Tensor]:
    """All tensors that a step may write to, except gradients."""
    for module in subject.modules:
        yield from module.parameters()
    for each in subject.objectives:
        yield from each.parameters
    for module in (inner for outer in subject.modules for inner in outer.modules()):
        held = (*buffers_of(module).values(), *vars(module).values())
        yield from (value for value in held if isinstance(value, Tensor))
    for optimizer in subject.optimizers:
        settings = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
        yield from (tensor for _, tensor in tensors_in([list(optimizer.state.values()), settings]))


def _is_written(tensor: Tensor) -> bool:
    """Whether a step could write to a tensor: not to an expanded one, whose elements share memory."""
    if tensor.is_inference():
        return False
    shared = tensor.layout == torch.strided and any(
        size > 1 and not stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return not shared
