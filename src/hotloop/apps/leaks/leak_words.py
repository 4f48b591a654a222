"""A leak in words: what grows, which line made it, who keeps it, and what to write instead."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from hotloop.apps.leaks.holders import Holder
from hotloop.placement.sites import Site
from hotloop.printing.text import size
from hotloop.records import Record

STREAK = 5  # steps in a row that must grow
LOG_BYTES = 1024  # bytes per step that a log of plain numbers may take
Kind = Literal["graph", "tensors", "hook", "traceback", "cycle", "unknown"]


@dataclass(frozen=True)
class Leftover(Record):
    """Tensors of one kind that steps left behind."""

    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int  # of all of them
    line: str | None  # that made them; None for the backward pass, which has no line on a GPU

    def __str__(self) -> str:
        made = f"made at {self.line}" if self.line else "made outside your own code"
        return f"{self.count} × {self.shape} {self.dtype}, {size(self.bytes)}, {made}"


@dataclass(frozen=True)
class Leak(Record):
    """Something that grows with every step, by what keeps it alive."""

    kind: Kind
    bytes_per_step: int  # on the device
    steps: int  # in a row that it grew
    holder: str
    line: str | None  # that puts the tensors there, where it was found
    leftovers: tuple[Leftover, ...]
    what: str
    fix: str

    def __str__(self) -> str:
        grown = f"{size(self.bytes_per_step)} more in each of {self.steps} steps"
        if not self.bytes_per_step:
            grown = f"its nodes take memory of the host, for {self.steps} steps by now"
        lines = [f"{self.what}: {grown}", f"held by {self.holder}"]
        lines += [f"at {self.line}"] if self.line else []
        lines += [str(leftover) for leftover in self.leftovers[:3]]
        return "\n  ".join([*lines, f"fix: {self.fix}"])


@dataclass(frozen=True)
class Birth:
    """Memory that was seen for the first time in a step."""

    step: int
    site: Site | None
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass
class Group:
    """What one holder keeps."""

    target: Tensor | None
    holder: Holder | None
    steps: int
    births: list[Birth] = field(default_factory=list)
    bytes_per_step: float = 0.0
    cycle: bool = False  # Python's garbage collector ended it

    @property
    def graph(self) -> bool:
        """Whether a graph hangs on what is kept."""
        return self.target is not None and self.target.grad_fn is not None


def matters(group: Group) -> bool:
    """A few plain numbers per step are what a log is; and an optimizer knows how long a history it needs."""
    if group.holder is not None and group.holder.optimizer:
        return False
    return group.graph or group.bytes_per_step >= LOG_BYTES


def tell(group: Group) -> Leak:
    """A group as a finding."""
    holder = group.holder
    unnamed = "a reference cycle" if group.cycle else "nothing that Python shows"
    kind, what, fix = _explain(group)
    kinds: dict[tuple[Any, ...], list[Birth]] = {}
    for birth in _repeated(group.births):
        kinds.setdefault((birth.shape, birth.dtype, birth.site), []).append(birth)
    leftovers = [
        Leftover(shape, dtype, len(same), sum(birth.bytes for birth in same), None if site is None else str(site))
        for (shape, dtype, site), same in kinds.items()
    ]
    return Leak(
        kind=kind,
        bytes_per_step=round(group.bytes_per_step),
        steps=group.steps,
        holder=str(holder) if holder is not None else unnamed,
        line=str(holder.site) if holder is not None and holder.site is not None else None,
        leftovers=tuple(sorted(leftovers, key=lambda leftover: -leftover.bytes)),
        what=what,
        fix=fix,
    )


def _repeated(births: list[Birth]) -> Iterator[Birth]:
    """Those of which many steps made some: what was made once, such as the optimizer's state, is meant to stay."""
    steps: dict[tuple[Any, ...], set[int]] = {}
    for birth in births:
        steps.setdefault((birth.site, birth.dtype, len(birth.shape)), set()).add(birth.step)
    for birth in births:
        if len(steps[birth.site, birth.dtype, len(birth.shape)]) >= STREAK:
            yield birth


def _explain(group: Group) -> tuple[Kind, str, str]:
    """The kind of a leak, what happens and what to write instead."""
    holder = group.holder
    if group.cycle:
        fix = (
            "break the cycle (an object, closure or exception that refers to itself), or call gc.collect() now and then"
        )
        return "cycle", "tensors in reference cycles wait for Python's garbage collector", fix
    if holder is None:
        fix = "look for tensors that an extension keeps, or a graph made with create_graph=True"
        return "unknown", "every step leaves tensors that no Python object holds", fix
    if holder.frame is not None:
        what = f"a kept exception keeps the variables of `{holder.frame}` by its traceback"
        return "traceback", what, f"keep str(error), or error.with_traceback(None), in `{holder.name}`"
    if holder.hook is not None:
        what = f"the hook `{holder.hook}` stores tensors of every step in `{holder.name}`"
        fix = f"{holder.name}.clear() after each step, or remove the hook with handle.remove()"
        return "hook", what, f"{fix}; store output.detach() where no gradient is needed" if group.graph else fix
    if group.graph:
        return "graph", f"`{holder.name}` keeps the autograd graph of every step", _detached(holder)
    fix = f"drop old tensors from `{holder.name}`, keep their numbers (.item()), or keep them on the host (.cpu())"
    return "tensors", f"`{holder.name}` gets new tensors in every step", fix


def _detached(holder: Holder) -> str:
    """The line that keeps the number and not the graph."""
    code = re.sub(r"\s+#.*", "", holder.site.code) if holder.site is not None else ""
    if not holder.container and "+=" not in code:
        name = f"self.{holder.name}" if holder.where.startswith("an attribute") else holder.name
        return f"{name} = {name}.detach()  # at the end of each step"
    put = re.fullmatch(r"(.*\.(?:append|appendleft|add)\()(.+)(\))", code) or re.fullmatch(r"(.*\+=\s*)(.+)()", code)
    if put is None:
        return f"put x.detach() and not x into `{holder.name}`; .item() does too, but waits for the device"
    before, value, after = put.groups()
    plain = re.fullmatch(r"[\w.]+(\(.*\))?", value)
    line = f"{before}{value if plain else f'({value})'}.detach(){after}"
    return f"{line}  # .item() does too, but waits for the device"
