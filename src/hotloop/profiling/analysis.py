"""From events and a look to a `Profile`."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hotloop.placement.sites import Site
from hotloop.printing.text import duration
from hotloop.profiling.advice import Loading, advise, has_kernels, part_words
from hotloop.profiling.costliest import OperationCall, costliest, costs, line_of, plain, waits_in
from hotloop.profiling.operation_log import LoggedOperation
from hotloop.profiling.parts import StepTimeline, on_device, replayed, timeline
from hotloop.profiling.profile_record import MemorySample, Profile, StepParts, TimeParts
from hotloop.profiling.trace_events import EPOCH, TraceEvent


@dataclass(frozen=True)
class ProfileContext:
    """What is known of a run besides its events."""

    name: str
    device: str
    device_name: str
    date: str
    versions: dict[str, str]
    skipped: int = 0
    plain: float | None = None
    seen: Sequence[LoggedOperation] = ()
    memory: tuple[MemorySample, ...] = ()
    peak_memory: int | None = None
    ceilings: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    loading: Loading = field(default_factory=Loading)


def analyse(events: Sequence[TraceEvent], about: ProfileContext) -> Profile:
    """Where the time of the steps in `events` went. At least one whole step must be there."""
    time = timeline(events)
    steps = len(time.steps)
    each = [time.spent(step) for step in range(steps)]
    total = time.total()
    device = on_device(events)
    found = costs(events, about.seen)
    batches = [event for event in events if event.kind == "data"]
    order = sorted(range(steps), key=lambda step: each[step].total)
    middle = order[(steps - 1) // 2]
    profile = Profile(
        name=about.name,
        device=about.device,
        device_name=about.device_name,
        date=about.date,
        versions=about.versions,
        steps=steps,
        skipped=about.skipped,
        seconds=tuple(parts.total for parts in each),
        plain=about.plain,
        parts=total,
        data_known=bool(batches),
        flops=_flops(about.seen),
        ceilings=about.ceilings,
        operations=costliest(found, steps, total.total / steps, device=device),
        waits=waits_in(found, steps, device=device),
        memory=about.memory,
        peak_memory=about.peak_memory,
        median_step=StepParts(middle + 1, each[middle], time.slices(middle)),
        slow_step=None,
        advice=(),
        notes=(*about.notes, *_unknown(about.device, device=device, batches=bool(batches))),
        replayed=replayed(events, time.steps),
    )
    if profile.replayed:
        profile = replace(profile, notes=(*profile.notes, _said_of_replays(profile)))
    if steps > 1:
        slow = order[-2] if steps > 2 else order[-1]
        words = _slower(profile.device, each, (middle, slow), found, events, time, device=device)
        profile = replace(profile, slow_step=StepParts(slow + 1, each[slow], time.slices(slow), words))
    return replace(profile, advice=advise(profile, about.loading))


def _said_of_replays(profile: Profile) -> str:
    return (
        f"The device replayed CUDA graphs for {profile.replay_share:.0%} of the time, which counts as computing. Their "
        "kernels stand without lines: no operation of PyTorch asks for them one by one."
    )


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


def _slower(
    name: str,
    each: Sequence[TimeParts],
    steps: tuple[int, int],
    found: Sequence[OperationCall],
    events: Sequence[TraceEvent],
    time: StepTimeline,
    *,
    device: bool,
) -> str:
    """What the slow step spent more time on than the median one."""
    middle, slow = steps
    longer = each[slow].total - each[middle].total
    if longer < 0.05 * each[middle].total:
        return "It took about as long as the median step: the steps are even."
    more = {part: each[slow].seconds[part] - each[middle].seconds[part] for part in each[slow].seconds}
    part = max(more, key=lambda part: more[part])
    words = f"It took {duration(longer)} longer than the median step; {part_words(part, name)} took "
    words += f"{duration(more[part])} more."
    start, end = time.steps[slow]
    if part == "data" and any(e.name == EPOCH and start <= e.start < end for e in events):
        return f"{words} A new epoch began in it: persistent_workers=True keeps the workers of a DataLoader."
    if part == "compute":
        words += _dearer(found, steps, device=device)
    return words


def _dearer(found: Sequence[OperationCall], steps: tuple[int, int], *, device: bool) -> str:
    """The operation that cost most more."""
    sums: dict[tuple[str, Site | None], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for cost in found:
        if cost.step in steps:
            sums[cost.name, cost.site][steps.index(cost.step)] += cost.device if device else cost.seconds
    if not sums:
        return ""
    key = max(sums, key=lambda key: sums[key][1] - sums[key][0])
    line = line_of(key[1])
    more = sums[key][1] - sums[key][0]
    where = "" if line is None else f" at {line}"
    return f" Most of it in {plain(key[0])}{where}: {duration(more)} more." if more > 0 else ""
