"""`watch_growth`: tensors that every step leaves behind, who made them, who keeps them, and what to write instead."""

from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor

from hotloop._torch import DispatchMode, next_node_number, node_number, storage_id, without_dispatch
from hotloop.apps.leaks.holders import Holder, holder_of
from hotloop.apps.leaks.leak_words import STREAK, Birth, Group, Leak, Leftover, matters, tell
from hotloop.memory.storages import Following, live_tensors, storages_of
from hotloop.placement.moving import known_shape
from hotloop.placement.placing import resolve
from hotloop.placement.sites import Site, user_site
from hotloop.values.tree import tensors_of

__all__ = ["Growth", "Leak", "Leftover", "watch_growth"]

NODES = 500_000  # of autograd graphs that are looked at
Total = tuple[int, int]  # bytes and count


def watch_growth(device: str | torch.device = "cpu") -> "Growth":
    """Watch the tensors on `device` from step to step: call `step()` after each, and `leaks()` to hear what grows.

    It takes six steps to tell growth from what training needs: buffers of the optimizer appear once and stay. Every
    operation passes through Python meanwhile, so watch a few steps and not a whole run.

    >>> weight, losses = torch.ones(256, requires_grad=True), []
    >>> with watch_growth() as growth:
    ...     for _ in range(8):
    ...         losses.append((weight * 2).square().sum())
    ...         growth.step()
    ...     leak, = growth.leaks()
    >>> leak.kind, leak.bytes_per_step
    ('graph', 1028)
    """
    return Growth(device)


class Growth(DispatchMode):
    """A watch that is under way: a loop enters it, calls `step()` after each step, and asks for `leaks()`."""

    def __init__(self, device: str | torch.device) -> None:
        super().__init__()
        self._following = Following(resolve(device), self._end)
        self._births: dict[int, Birth] = {}
        self._totals: dict[Site | None, Total] = {}
        self._history: list[dict[Site | None, Total]] = []
        self._first = next_node_number()  # number of the first autograd node that is ours
        self._numbers: list[int] = []  # of the next one, at the end of each step
        for tensor in live_tensors():
            self._following.see(tensor)

    def step(self) -> None:
        """Note that a step has ended."""
        self._history.append(dict(self._totals))
        self._numbers.append(next_node_number())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of((args, kwargs, result)):
            for key, bytes_ in self._following.see(tensor):
                self._born(key, bytes_, tensor)
        return result

    def _born(self, key: int, bytes_: int, tensor: Tensor) -> None:
        site = user_site()
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._births[key] = Birth(len(self._history), site, known_shape(tensor), dtype, bytes_)
        total, count = self._totals.get(site, (0, 0))
        self._totals[site] = total + bytes_, count + 1

    def _end(self, key: int, _: int) -> None:
        birth = self._births.pop(key, None)
        if birth is not None:
            total, count = self._totals[birth.site]
            self._totals[birth.site] = total - birth.bytes, count - 1

    def leaks(self) -> tuple[Leak, ...]:
        """What every step left behind so far, the largest first. It searches all of Python's objects: some seconds."""
        growing = {site: streak for site in self._totals if (streak := self._streak(site))}
        before = {site: self._left(site) for site in growing}
        tensors = live_tensors()  # after collecting garbage
        groups: dict[str, Group] = {}
        with without_dispatch():
            scene = _Scene(self, tensors)
            for site, streak in growing.items():
                left = self._left(site)
                cycle = len({birth.step for birth in left.values()}) < STREAK
                target, holder = (None, None) if cycle else scene.keeper(left)
                self._enter(groups, Group(target, holder, streak, cycle=cycle), site, before[site] if cycle else left)
            for root, steps in scene.long_graphs():
                holder = holder_of(root, scene.ours)
                if holder is not None:
                    self._enter(groups, Group(root, holder, steps))
        found = [tell(group) for group in groups.values() if matters(group)]
        return tuple(sorted(found, key=lambda leak: -leak.bytes_per_step))

    def _enter(
        self, groups: dict[str, Group], group: Group, site: Site | None = None, left: dict[int, Birth] | None = None
    ) -> None:
        name = str(group.holder) if group.holder is not None else f"cycle: {group.cycle}"
        known = groups.setdefault(name, group)
        known.steps = max(known.steps, group.steps)
        if group.graph and not known.graph:
            known.target = group.target
        if left:
            totals = [step.get(site, (0, 0))[0] for step in self._history]
            known.bytes_per_step += (totals[-1] - totals[-1 - group.steps]) / group.steps
            known.births += left.values()

    def _streak(self, site: Site | None) -> int:
        """How many of the last steps left more tensors of this line, about as many each; 0 for too few."""
        counts = [step.get(site, (0, 0))[1] for step in self._history]
        more: list[int] = []
        for now, before in zip(counts[:0:-1], counts[-2::-1], strict=True):
            more.append(now - before)
            if min(more) < 1 or max(more) > 2 * min(more):
                more.pop()
                break
        ages = {birth.step for birth in self._left(site).values()}
        return len(more) if len(more) >= STREAK and len(ages) >= STREAK else 0

    def _left(self, site: Site | None) -> dict[int, Birth]:
        """What steps that are over left of this line; of the last one, variables are still in use."""
        over = len(self._history) - 1
        return {key: birth for key, birth in list(self._births.items()) if birth.site == site and birth.step < over}

    def step_of(self, number: int) -> int | None:
        """The step in which an autograd node was made; None before the watch and in a step that is not over."""
        step = bisect_right(self._numbers, number)
        return step if number >= self._first and step < len(self._numbers) else None


class _Scene:
    """The tensors that Python knows, and the graphs that hang on them."""

    def __init__(self, growth: Growth, tensors: list[Tensor]) -> None:
        self.ours = {id(tensors)}
        self._tensors: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            for storage in storages_of(tensor):
                self._tensors.setdefault(storage_id(storage), []).append(tensor)
        self.ours |= {id(same) for same in self._tensors.values()}
        budget = NODES
        self._graphs: list[tuple[Tensor, set[int]]] = []
        for tensor in tensors:
            if tensor.grad_fn is not None and budget > 0:
                steps, nodes = _steps_in_graph(tensor.grad_fn, growth, budget)
                budget -= nodes
                self._graphs.append((tensor, steps))
        self.ours |= {id(pair) for pair in self._graphs}
        self._found: dict[int, Holder | None] = {}

    def keeper(self, left: dict[int, Birth]) -> tuple[Tensor | None, Holder | None]:
        """The tensor by which memory is kept, itself or the one whose graph keeps it, and who keeps that tensor."""
        steps = sorted({birth.step for birth in left.values()})
        step = steps[len(steps) // 2]  # neither the first, which also makes what stays, nor the last
        direct = [t for key, birth in left.items() if birth.step == step for t in self._tensors.get(key, ())]
        self.ours.add(id(direct))
        longest = sorted(self._graphs, key=lambda graph: -len(graph[1]))
        for tensor in (*direct, *(root for root, steps in longest if step in steps)):
            if id(tensor) not in self._found:
                self._found[id(tensor)] = holder_of(tensor, self.ours)
            if (holder := self._found[id(tensor)]) is not None:
                return tensor, holder
        return None, None

    def long_graphs(self) -> list[tuple[Tensor, int]]:
        """Tensors whose graph goes back over many steps, and over how many."""
        return [(root, len(steps)) for root, steps in self._graphs if len(steps) >= STREAK]


def _steps_in_graph(root: Any, growth: Growth, budget: int) -> tuple[set[int], int]:
    """The steps in which the nodes of a graph were made, and how many nodes were looked at."""
    steps: set[int] = set()
    seen, ahead = {root}, [root]
    while ahead and len(seen) < budget:
        node = ahead.pop()
        number = node_number(node)
        step = None if number is None else growth.step_of(number)
        if step is not None:
            steps.add(step)
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        ahead += new
    return steps, len(seen)
