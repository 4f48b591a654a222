"""From events and a look to a `Profile`."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hotloop.profiling.advice import Loading, advise, has_kernels
from hotloop.profiling.costliest import costliest, costs, waits_in
from hotloop.profiling.operation_log import LoggedOperation
from hotloop.profiling.parts import divided, on_device, replayed, steps_in
from hotloop.profiling.profile_record import Profile
from hotloop.profiling.trace_events import TraceEvent


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
