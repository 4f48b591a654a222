"""From events and a look to a `Profile`: the costliest operations and the waits of the host, by the person's lines."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotloop.placement.sites import Site, short
from hotloop.profiling.advice import Loading, advise, has_kernels
from hotloop.profiling.operation_log import LoggedOperation
from hotloop.profiling.profile_record import HostWait, Line, OperationCost, Profile
from hotloop.profiling.time_parts import divided, on_device, replayed, steps_in, training_threads
from hotloop.profiling.trace import ON_DEVICE, TraceEvent

TOP = 10
REPLAYED = "CUDA graph"  # the phase of what a graph does: nobody asked for it by an operation
WAITING = {  # operations that wait for a device, by what people write
    "aten::_local_scalar_dense": ".item() or a branch on a tensor",
    "aten::_to_copy": ".cpu() or .to()",
    "aten::copy_": ".cpu(), .to() or .copy_()",
    "aten::nonzero": ".nonzero() or an index of true and false",
    "aten::masked_select": ".masked_select()",
    "aten::_unique2": ".unique()",
    "cudaDeviceSynchronize": "torch.cuda.synchronize()",
    "cudaEventSynchronize": "synchronize() of an event",
    "cudaStreamSynchronize": "synchronize() of a stream",
}
READING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"}  # on any device
_HOST = ("operation", "update", "data", "wait", "call")


def analyse(
    events: Sequence[TraceEvent],
    seen: Sequence[LoggedOperation] = (),
    loading: Loading = Loading(),  # noqa: B008  # frozen
    notes: Sequence[str] = (),
    **known: Any,
) -> Profile:
    """Where the time of the steps in `events` went. At least one whole step must be there.

    `seen` is one step of the same loop, looked at; `known` are fields of the profile that events do not tell.
    """
    steps = steps_in(events)
    parts = divided(events, steps)
    device = on_device(events)
    found = costs(events, seen)
    batches = any(event.kind == "data" for event in events)
    profile = Profile(
        **known,
        steps=len(steps),
        seconds=tuple(end - start for start, end in steps),
        parts=parts,
        data_known=batches,
        flops=_flops(seen),
        operations=costliest(found, len(steps), parts.total / len(steps), device=device),
        waits=waits_in(found, len(steps), device=device),
        advice=(),
        notes=(*notes, *_unknown(known["device"], device=device, batches=batches)),
        replayed=replayed(events, steps),
    )
    if profile.replayed:
        said = (
            f"The device replayed CUDA graphs for {profile.replay_share:.0%} of the time, which counts as computing. "
            "Their kernels stand without lines: no operation of PyTorch asks for them one by one."
        )
        profile = replace(profile, notes=(*profile.notes, said))
    return replace(profile, advice=advise(profile, loading))


def _unknown(name: str, *, device: bool, batches: bool) -> Iterator[str]:
    """What the events cannot tell, and why."""
    if has_kernels(name) and not device:
        yield f"The profiler has recorded nothing on {name}, so these are the times of the host alone."
    if not batches:
        yield "No DataLoader was seen in these steps, so how long they wait for data is unknown; it is among the gaps."


def _flops(seen: Sequence[LoggedOperation]) -> dict[str, float]:
    """Operations by precision; those that prepare data are not the step's."""
    counts: dict[str, float] = defaultdict(float)
    for each in seen:
        if each.flops and each.phase != "data":
            counts[each.precision] += each.flops
    return dict(counts)


@dataclass(slots=True)
class OperationCall:
    """An operation that ran once, with all that it asked for in turn."""

    name: str
    phase: str
    step: int
    start: float
    whole: bool  # with the operations inside it; else by itself
    seconds: float = 0.0  # on the host
    device: float = 0.0  # seconds on the device
    waited: float = 0.0  # seconds in which the host waited for the device
    seen: LoggedOperation | None = None  # the same operation in the step that was looked at
    inner: "OperationCall | None" = None  # the first inside it that is whole: what it was begun for

    def add(self, *, seconds: float = 0.0, device: float = 0.0, waited: float = 0.0) -> None:
        self.seconds = max(self.seconds + seconds, 0.0)
        self.device += device
        self.waited += waited

    @property
    def site(self) -> Site | None:
        """The line of the person's that asked for it."""
        known = self.seen or (self.inner.seen if self.inner else None)
        return known.site if known else None


@dataclass(slots=True)
class _Open:
    """An event of the host that has not ended yet."""

    end: float
    phase: str
    cost: OperationCall | None


def costs(events: Sequence[TraceEvent], seen: Iterable[LoggedOperation]) -> list[OperationCall]:
    """What each operation of each step cost. `seen` is one step of the same loop, looked at."""
    known: dict[tuple[str, str], list[LoggedOperation]] = defaultdict(list)
    for each in seen:
        known[each.phase, each.name].append(each)
    marks = sorted(event.end for event in events if event.kind == "mark")
    asked: dict[int, OperationCall] = {}
    found: list[OperationCall] = []
    for thread in training_threads(events):
        own = sorted((e for e in events if e.kind in _HOST and e.thread == thread), key=lambda e: (e.start, -e.end))
        found += _walk(own, known, marks, asked)
    found = [cost for cost in found if 0 <= cost.step < len(marks) - 1]
    found += _on_the_device(events, asked, marks)
    _match(found, known)
    return found


def costliest(
    found: Iterable[OperationCall], steps: int, step_seconds: float, *, device: bool
) -> tuple[OperationCost, ...]:
    """The operations that take most of the time, by the line that asks for them."""
    groups: dict[tuple[str, str, Site | None], list[OperationCall]] = defaultdict(list)
    for cost in found:
        if device or cost.phase != "data":  # on a CPU, that is time of waiting for data
            groups[cost.name, cost.phase, cost.site].append(cost)
    rows = []
    for (name, phase, site), group in groups.items():
        seconds = sum(cost.device if device else cost.seconds for cost in group) / steps
        if seconds > 0:
            largest = max(group, key=lambda cost: cost.device if device else cost.seconds)
            shapes = largest.seen.shapes if largest.seen else ""
            share = seconds / step_seconds if step_seconds else 0.0
            calls = len(group) / steps
            rows.append(OperationCost(plain(name), phase, line_of(site), seconds, share, calls, shapes))
    return tuple(sorted(rows, key=lambda row: -row.seconds)[:TOP])


def waits_in(found: Iterable[OperationCall], steps: int, *, device: bool) -> tuple[HostWait, ...]:
    """Where the host waits for the device; on a CPU, where it would wait for one."""
    groups: dict[tuple[str, Site | None], list[float]] = defaultdict(list)
    for cost in found:
        if cost.waited if device else _would_wait(cost):
            what = WAITING.get(cost.name, plain(cost.name))
            groups[what, cost.site].append(cost.waited if device else cost.seconds)
    rows = [
        HostWait(what, line_of(site), sum(times) / steps, len(times) / steps) for (what, site), times in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.seconds)[:TOP])


def _would_wait(cost: OperationCall) -> bool:
    """Whether an operation on a CPU would make the host wait for a GPU."""
    # Optimizers read their own counters, which lie on the host whatever the device is; hotloop's Loop reads the loss
    # in every step only where the device is the host.
    ours = cost.seen is not None and cost.seen.by_hotloop
    return cost.name in READING and cost.phase in ("forward", "backward") and not ours


def line_of(site: Site | None) -> Line | None:
    """A line as a profile keeps it."""
    return None if site is None else Line(short(site.file), site.line, site.code)


def plain(name: str) -> str:
    """The name of an operation without what tells a reader nothing.

    >>> plain("aten::addmm"), plain("autograd::engine::evaluate_function: MmBackward0")
    ('addmm', 'MmBackward0')
    """
    for prefix in ("autograd::engine::evaluate_function: ", "torch::autograd::", "aten::", "void "):
        name = name.removeprefix(prefix)
    return name.split("<")[0].split("(")[0].strip() or name


def _walk(
    events: Sequence[TraceEvent],
    known: dict[tuple[str, str], list[LoggedOperation]],
    marks: list[float],
    asked: dict[int, OperationCall],
) -> Iterator[OperationCall]:
    """The operations of one thread. One that the look has seen is taken whole, the others each by itself."""
    stack: list[_Open] = []
    for event in events:
        while stack and stack[-1].end <= event.start:
            stack.pop()
        outer = stack[-1] if stack else _Open(0.0, "forward", None)
        phase, cost, taken = _phase(event, outer.phase), outer.cost, event.end - event.start
        calls = event.kind in ("wait", "call")
        if (event.kind == "operation" and not (cost and cost.whole)) or (event.kind == "wait" and cost is None):
            step = bisect_right(marks, event.start) - 1
            if cost is not None:
                cost.add(seconds=-taken)
            is_whole = (phase, event.name) in known
            cost = OperationCall(event.name, phase, step, event.start, is_whole, seconds=0.0 if calls else taken)
            if cost.whole:
                _begin_for(cost, stack)
            yield cost
        if not calls:
            stack.append(_Open(event.end, phase, cost))
        elif cost is not None:
            cost.add(waited=taken if event.kind == "wait" else 0.0)
            if event.correlation is not None:
                asked[event.correlation] = cost


def _begin_for(cost: OperationCall, stack: Iterable[_Open]) -> None:
    """Tell those around an operation what they were begun for."""
    for outer in stack:
        if outer.cost is not None and outer.cost.inner is None:
            outer.cost.inner = cost


def _phase(event: TraceEvent, outer: str) -> str:
    if event.kind in ("data", "update"):
        return event.kind
    if outer == "forward" and event.name.startswith("autograd::engine"):
        return "backward"
    return outer


def _on_the_device(
    events: Sequence[TraceEvent], asked: dict[int, OperationCall], marks: list[float]
) -> list[OperationCall]:
    """Give the time of the device to the operations that asked for it; what nobody asked for stands for itself."""
    alone = []
    calls = [e for e in events if e.kind in ("wait", "call") and e.correlation is not None]
    called: dict[int | None, float] = {call.correlation: call.start for call in calls}
    graphs = {e.correlation for e in events if e.kind == "replay"}
    for event in events:
        if event.kind in ON_DEVICE:
            cost = asked.get(event.correlation) if event.correlation is not None else None
            if cost is None:
                begin = called.get(event.correlation, event.start)  # a host that runs ahead has ended the step since
                step, phase = bisect_right(marks, begin) - 1, REPLAYED if event.correlation in graphs else ""
                if 0 <= step < len(marks) - 1:
                    cost = OperationCall(event.name, phase, step, event.start, whole=False)
                    alone.append(cost)
            if cost is not None:
                cost.add(device=event.end - event.start)
    return alone


def _match(found: Iterable[OperationCall], known: dict[tuple[str, str], list[LoggedOperation]]) -> None:
    """Pair operations with those that were seen: the third `addmm` of a forward is the third that was seen there.

    Where a step runs another number of them than the one that was looked at, only what is the same for all is known;
    of more that are no whole multiple, some were asked for by a line that was not seen.
    """
    groups: dict[tuple[int, str, str], list[OperationCall]] = defaultdict(list)
    for cost in found:
        if cost.whole:
            groups[cost.step, cost.phase, cost.name].append(cost)
    for (_, phase, name), group in groups.items():
        entries = known[phase, name]
        group.sort(key=lambda cost: cost.start)
        if len(entries) == len(group):
            for cost, entry in zip(group, entries, strict=True):
                cost.seen = entry
        elif len({entry.site for entry in entries}) == 1 and (
            len(group) < len(entries) or len(group) % len(entries) == 0
        ):
            for cost in group:
                cost.seen = entries[0]
