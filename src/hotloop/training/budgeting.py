"""`budgeted`: which blocks to checkpoint so that a step keeps its memory budget, measured in steps that are undone."""

import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hotloop._torch import storage_id
from hotloop.device.clock import Clock
from hotloop.errors import BadArgument
from hotloop.levers import repeated_blocks
from hotloop.memory.budget import CheckpointCandidate, bytes_of, choose, most, saving
from hotloop.memory.micro_batches import micro_batches_of
from hotloop.memory.oom import clear, is_out_of_memory
from hotloop.memory.storages import storages_of
from hotloop.memory.usage import usage
from hotloop.objective.objectives import items_in
from hotloop.placement import tensors_in
from hotloop.plan import Plan
from hotloop.printing.text import duration, plural, size
from hotloop.records import Record
from hotloop.tune.rehearsal import Rehearsal, confirm, fresh, in_use, rehearsing, time_of
from hotloop.tune.subject import Subject

ROUNDS = 8  # choices that are measured
LOOKS = 3  # steps in which blocks are timed
SLIGHT = 0.005  # share of all that is kept: blocks that keep less are not worth a look


@dataclass(frozen=True)
class Budgeting(Record):
    """How a memory budget was kept: measured peaks and seconds of a step, before and after."""

    budget: int  # bytes
    peak_before: int | None  # None where the step ran out of memory
    peak_after: int | None
    step_before: float | None
    step_after: float | None
    recompute: tuple[str, ...]  # the blocks that are computed again
    rows: tuple[CheckpointCandidate, ...]  # those that could be
    tried: int  # choices that were measured

    @property
    def missing(self) -> int | None:
        """Bytes by which the budget is exceeded nevertheless; None where the step still runs out of memory."""
        return None if self.peak_after is None else max(self.peak_after - self.budget, 0)

    def __str__(self) -> str:
        peaks = f"peak {_peak_words(self.peak_before)} before, {_peak_words(self.peak_after)} after"
        steps = f"step {duration(self.step_before)} before, {duration(self.step_after)} after"
        again = f"{plural(len(self.recompute), 'block')} of {len(self.rows)} checkpointed"
        lines = [f"budget {size(self.budget)}: {peaks}; {steps}; {again}"]
        if self.missing != 0:
            lack = "the step does not fit" if self.missing is None else f"{size(self.missing)} are missing"
            why = "all blocks are checkpointed" if self.rows else "the model repeats no block that could be"
            lines.append(f"{lack}, and {why}\n  fix: use smaller micro-batches: micro_batch=… in the plan")
        return "\n".join(lines)


def _peak_words(peak: int | None) -> str:
    return "out of memory" if peak is None else size(peak)


def budgeted(
    subject: Subject, plan: Plan, batch: Any, generators: Iterable[torch.Generator] = ()
) -> tuple[Plan, Budgeting]:
    """A plan whose `recompute` keeps its `memory_budget` with the least slowdown, and how that was found.

    Blocks of the model and their parts are weighed by the bytes that they keep and the time that they take. The
    choice is verified by whole steps on `batch`, which is on the device, and corrected until the peak is within the
    budget. The peak is that of CUDA's allocator, on a CPU of all tensors. All is left as it was, to the bit.
    """
    if plan.memory_budget is None:
        raise BadArgument("the plan has no memory_budget", fix='set it: Plan(…, memory_budget="8GiB")')
    if subject.device.type not in ("cpu", "cuda"):
        raise BadArgument(
            f"memory_budget= on {subject.device.type}, which reports no peak memory", fix="use CUDA or a CPU"
        )
    budget = bytes_of(plan.memory_budget, usage(subject.device).total)
    items = items_in(batch)
    first, *_ = next(micro_batches_of(batch, items, plan.micro_batch or items))
    is_cut = items_in(first) < items  # then gradients are there in the forward pass of the second one
    plain = replace(plan, checkpointing=False, recompute=(), accumulate=max(plan.accumulate, 2 if is_cut else 1))
    with rehearsing(subject, generators) as rehearsal:
        record = _Weighing(rehearsal, plain, first, budget).run()
    return replace(plan, checkpointing=False, recompute=record.recompute), record


@dataclass(frozen=True)
class _Measured:
    peak: int | None = None  # None: out of memory
    seconds: float | None = None

    def keeps(self, budget: int) -> bool:
        return self.peak is not None and self.peak <= budget


@dataclass(frozen=True)
class _Profile:
    """Measurements of the plain step."""

    blocks: tuple[CheckpointCandidate, ...]
    peak: int
    headroom: int  # how far the end of the forward pass is below the peak


class _Weighing:
    """Choices of blocks for one budget, measured until one keeps it."""

    def __init__(self, rehearsal: Rehearsal, plan: Plan, batch: Any, budget: int) -> None:
        self._rehearsal, self._plan, self._batch, self._budget = rehearsal, plan, batch, budget
        self._device = rehearsal.subject.device
        self._found: dict[tuple[str, ...], _Measured] = {}

    def run(self) -> Budgeting:
        plain = self._found[()] = self._measure(self._batch, ())
        if plain.keeps(self._budget):
            return self._record((), ())
        profile = self._profile(plain)
        named = {block.name: block for block in profile.blocks}
        error = 0  # of the model, in the choice measured last
        low, high = 0, 2 * profile.peak  # savings by the model: the largest that is too little, the smallest that does
        for _ in range(ROUNDS if named else 0):
            needed = min(max(profile.peak - self._budget + error, low + 1), high - 1)
            names = self._unknown(profile, needed, (low + high) // 2)
            if names is None:
                break
            self._found[names] = seen = self._measure(self._batch, names)
            saved = saving((named[name] for name in names), profile.headroom)
            if seen.keeps(self._budget):
                high = min(high, saved)
            else:
                low = max(low, saved)
            if seen.peak is not None:
                error = seen.peak - (profile.peak - saved)
        good = [names for names, seen in self._found.items() if seen.keeps(self._budget)]
        if good:
            best = self._trimmed(min(good, key=lambda names: sum(named[name].seconds for name in names)), profile)
        else:
            best = most(profile.blocks, profile.headroom)
            self._found[best] = self._found.get(best) or self._measure(self._batch, best)
        return self._record(best, profile.blocks)

    def _unknown(self, profile: _Profile, *needed: int) -> tuple[str, ...] | None:
        """A choice not measured yet that should save one of these amounts, the first that has one."""
        for figure in needed:
            names = choose(profile.blocks, figure, profile.headroom)
            names = most(profile.blocks, profile.headroom) if names is None else names
            if names not in self._found:
                return names
        return None

    def _trimmed(self, names: tuple[str, ...], profile: _Profile) -> tuple[str, ...]:
        """A choice that saves no more than needed, by the measured peak."""
        for _ in range(ROUNDS):
            peak, chosen = self._found[names].peak or 0, [block for block in profile.blocks if block.name in names]
            spare = [block for block in chosen if peak + block.saved <= self._budget]
            if not spare:
                break
            chosen.remove(max(spare, key=lambda block: block.seconds))
            fewer = choose(profile.blocks, saving(chosen, profile.headroom), profile.headroom) or ()
            if fewer not in self._found:
                self._found[fewer] = self._measure(self._batch, fewer)
            if not self._found[fewer].keeps(self._budget):
                break
            names = fewer
        return names

    def _record(self, names: tuple[str, ...], blocks: tuple[CheckpointCandidate, ...]) -> Budgeting:
        before, after = self._found[()], self._found[names]
        seconds = before.seconds, after.seconds
        return Budgeting(self._budget, before.peak, after.peak, *seconds, names, blocks, len(self._found))

    def _measure(self, batch: Any, names: tuple[str, ...]) -> _Measured:
        """Peak and seconds of whole steps with these blocks checkpointed."""
        found = _Measured()
        clear(self._device)
        try:
            with self._rehearsal.step(replace(self._plan, recompute=names)) as step:
                peak = self._rehearsal.peak_of(lambda: confirm(step, batch))
                found = _Measured(peak, time_of(step, batch))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        clear(self._device)  # outside of `except`: the error holds the frames of the step, and they hold its tensors
        return found

    def _profile(self, plain: _Measured) -> _Profile:
        """The blocks by bytes and seconds; where the plain step does not fit, on fewer items, and scaled."""
        whole = items_in(self._batch)
        items = whole if plain.peak is not None else whole // 2
        while True:
            part, *_ = next(micro_batches_of(self._batch, whole, max(items, 1)))
            seen = plain if items == whole else self._measure(part, ())
            if seen.peak is not None:
                break
            if items <= 1:
                return _Profile((), 0, 0)
            items //= 2
        scale = whole / items_in(part)
        with self._rehearsal.step(self._plan) as step:
            look = Look(self._rehearsal.subject.model, self._device)
            blocks = look.blocks(lambda: step(fresh(part)))
        clear(self._device)
        held = look.before
        blocks = [CheckpointCandidate(b.name, int(b.saved * scale), b.seconds * scale) for b in blocks]
        peak = int(held + (seen.peak - held) * scale)
        return _Profile(tuple(blocks), peak, max(0, peak - held - int(look.kept * scale)))


@dataclass(eq=False)
class _Kept:
    """A tensor saved by autograd, in a holder that can be emptied."""

    tensor: Tensor | None


class Look:
    """Measures the blocks of a model in training: bytes each saves for the backward pass, and its seconds."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.before = 0  # bytes in use when the forward pass begins
        self.kept = 0  # bytes kept for the backward pass in all
        self._model, self._device = model, device
        self._modules = candidates(model)
        self._fixed = {storage_id(s) for t in (*model.parameters(), *model.buffers()) for s in storages_of(t)}
        self._inside: list[str] = []  # the blocks that run, outermost first
        self._inputs: dict[str, set[int]] = {name: set() for name in self._modules}
        self._keeps: dict[int, tuple[int, set[str]]] = {}  # bytes, and the blocks in which all who keep them are
        self._held: WeakSet[_Kept] = WeakSet()
        self._clocks: dict[str, list[tuple[Clock, Any]]] = {name: [] for name in self._modules}

    def blocks(self, step: Callable[[], object]) -> list[CheckpointCandidate]:
        """The blocks for which activation checkpointing would save memory."""
        step()  # so that what happens only once has happened
        entered = self._model.register_forward_pre_hook(self._begin)
        try:
            with self._watched(self._enter, self._leave), saved_tensors_hooks(self._keep, lambda kept: kept.tensor):
                step()
        finally:
            entered.remove()
            for kept in list(self._held):  # a step that failed: PyTorch cannot free a graph that hooks hold
                kept.tensor = None
        with self._watched(self._start, self._stop):
            for _ in range(LOOKS):
                step()
        self.kept = sum(bytes_ for bytes_, _ in self._keeps.values())
        found = []
        for name, module in self._modules.items():
            mine = (b for key, (b, where) in self._keeps.items() if name in where and key not in self._inputs[name])
            found.append((type(module), CheckpointCandidate(name, sum(mine), self._seconds(name))))
        return _evened([(kind, block) for kind, block in found if block.saved > SLIGHT * self.kept])

    @contextmanager
    def _watched(self, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
        with ExitStack() as undo:
            for name, module in self._modules.items():
                undo.callback(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True).remove)
                undo.callback(module.register_forward_hook(partial(leave, name), always_call=True).remove)
            yield

    def _begin(self, *_: object) -> None:
        self.before = self.before or in_use(self._device)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside.append(name)
        given = (tensor for _, tensor in tensors_in([args, kwargs]))  # a block that is computed again keeps these
        self._inputs[name] |= {storage_id(storage) for tensor in given for storage in storages_of(tensor)}

    def _leave(self, name: str, *_: object) -> None:
        if name in self._inside:
            del self._inside[self._inside.index(name) :]

    def _keep(self, tensor: Tensor) -> "_Kept":
        for storage in storages_of(tensor):
            if storage_id(storage) not in self._fixed and storage.device.type == self._device.type:
                where = self._keeps.setdefault(storage_id(storage), (storage.nbytes(), set(self._inside)))[1]
                where &= set(self._inside)
        kept = _Kept(tensor)
        self._held.add(kept)
        return kept

    def _start(self, name: str, *_: object) -> None:
        self._clocks[name].append((Clock(self._device), None))

    def _stop(self, name: str, *_: object) -> None:
        clock, _ = self._clocks[name].pop()
        self._clocks[name].append((clock, clock.lap()))

    def _seconds(self, name: str) -> float:
        """Seconds of a block in a step, in which it may run several times."""
        times = [clock.seconds(lap) for clock, lap in self._clocks[name] if lap is not None]
        return statistics.median(times) * len(times) / LOOKS if times else 0.0


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Candidates for checkpointing: the repeated blocks of a model, and the parts of each."""
    blocks = {id(block) for block in repeated_blocks(model)}
    names = {name: module for name, module in model.named_modules() if id(module) in blocks}
    parts = {f"{name}.{inner}": part for name, block in names.items() for inner, part in block.named_children()}
    return names | parts


def _evened(found: list[tuple[type, CheckpointCandidate]]) -> list[CheckpointCandidate]:
    """Give blocks of one kind and equal bytes the same time: theirs differ by noise alone."""
    alike: dict[tuple[type, int], list[float]] = {}
    for kind, block in found:
        alike.setdefault((kind, block.saved), []).append(block.seconds)
    return [replace(block, seconds=statistics.median(alike[kind, block.saved])) for kind, block in found]
