"""The parts of a step: they never overlap, are never negative, and add up to the time that passed."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.profiling.profile_record import TimeParts
from hotloop.profiling.time_parts import divided, steps_in

from .timelines import BACKWARD, HOST, STREAM, event, mark

ON_HOST = ("data", "operation", "update", "talk", "wait", "call")
MOMENTS = st.floats(0, 100, allow_nan=False)


def stretch(kinds: tuple[str, ...], threads: tuple[int, ...]):
    made = st.tuples(st.sampled_from(kinds), MOMENTS, MOMENTS, st.sampled_from(threads), st.integers(1, 20))
    return made.map(lambda m: event(m[0], min(m[1:3]), max(m[1:3]), thread=m[3], link=m[4]))


TIMELINES = st.tuples(
    st.lists(MOMENTS, min_size=2, max_size=8).map(lambda marks: [mark(at) for at in marks]),
    st.lists(stretch(ON_HOST, (HOST, BACKWARD)), max_size=20),
    st.lists(stretch(("kernel", "copy", "communication"), (STREAM, STREAM + 1)), max_size=20),
).map(lambda three: [e for part in three for e in part])


def parts_of(events) -> TimeParts:
    return divided(events, steps_in(events))


@given(TIMELINES)
def test_the_parts_add_up_to_the_time_of_the_steps(events) -> None:
    parts = parts_of(events)
    assert parts.total == pytest.approx(sum(end - start for start, end in steps_in(events)), abs=1e-9)
    assert all(seconds >= 0 for seconds in parts.seconds.values())
    each = [divided(events, [step]).seconds for step in steps_in(events)]
    for name, seconds in parts.seconds.items():
        assert sum(one[name] for one in each) == pytest.approx(seconds, abs=1e-9)


@given(TIMELINES)
def test_steps_follow_one_another(events) -> None:
    steps = steps_in(events)
    assert all(start <= end for start, end in steps)
    assert all(before[1] == after[0] for before, after in pairwise(steps))


def test_on_a_cpu_the_time_goes_to_data_operations_and_python() -> None:
    events = [mark(0), event("data", 0, 6), event("operation", 1, 2), event("operation", 7, 9), mark(10)]
    parts = parts_of(events)
    assert (parts.data, parts.compute, parts.gaps) == (6, 2, 2)
    assert (parts.copies, parts.waits, parts.communication) == (0, 0, 0)


def test_what_the_device_does_counts_before_what_the_host_does() -> None:
    events = [
        mark(0),
        event("data", 0, 4),  # while the device still computes until 3
        event("kernel", 0, 3, thread=STREAM),
        event("copy", 4, 6, thread=STREAM),
        event("kernel", 5, 7, thread=STREAM + 1),  # beside the copy
        event("communication", 6, 8, thread=STREAM),
        event("wait", 6, 9),
        mark(10),
    ]
    parts = parts_of(events)
    assert parts.compute == 3 + 2
    assert parts.data == 1
    assert parts.copies == 1
    assert parts.communication == 1
    assert parts.waits == 1
    assert parts.gaps == 1


def test_threads_beside_the_loop_do_not_count() -> None:
    pinning = 99
    host = [mark(0), event("operation", 0, 10, thread=pinning), event("operation", 2, 3), mark(10)]
    assert parts_of(host).compute == 1
    device = [mark(0), event("wait", 0, 10, thread=pinning), event("kernel", 2, 3, thread=STREAM), mark(10)]
    assert parts_of(device).waits == 0


def test_the_threads_of_backward_passes_count() -> None:
    events = [mark(0), event("operation", 2, 8, "autograd::engine::evaluate_function: X", BACKWARD), mark(10)]
    assert parts_of(events).compute == 6


def test_a_host_that_runs_ahead_has_not_ended_its_step() -> None:
    events = [
        mark(0),
        event("call", 0.1, 0.2, link=1),
        mark(1),
        event("call", 1.1, 1.2, link=2),
        mark(2),
        event("kernel", 0.2, 5, thread=STREAM, link=1),
        event("kernel", 5, 9, thread=STREAM, link=2),
    ]
    assert steps_in(events) == [(0, 5), (5, 9)]
    assert parts_of(events).compute == pytest.approx(8.8)
