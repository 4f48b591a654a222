"""Memory over time: what is kept of it when it is thinned, and whose it was."""

import json

from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.simulate.cards import generic
from hotloop.apps.simulate.events import Operation
from hotloop.apps.simulate.ledger import POINTS, Timeline
from hotloop.apps.simulate.library_memory import Constants
from hotloop.apps.simulate.memory import MemoryListener
from hotloop.apps.simulate.simulation_record import Simulation
from hotloop.placement.sites import Site

MIB = 2**20
KINDS = ("parameter", "gradient", "optimizer", "activation", "input", "buffer", "temporary")
CONSTANTS = Constants("any", "2.11", True, "made up", context={"base": 200 * MIB}, convolution={})


def memory() -> MemoryListener:
    return MemoryListener(generic("64GiB"), constants=CONSTANTS)


def record_of(model: MemoryListener) -> Simulation:
    """After a trip through a file."""
    made = Simulation("vram-64GiB", 3, 3, **model.to_record())
    return Simulation.from_json(json.loads(json.dumps(made.to_json())))


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=2000), st.integers(2, 32))
def test_both_peaks_are_kept(heights: list[tuple[int, int]], points: int) -> None:
    timeline = Timeline(points)
    for allocated, reserved in heights:
        timeline.add(allocated, reserved)
    kept = timeline.points()
    assert len(kept) <= 2 * points
    assert max(point[1] for point in kept) == max(allocated for allocated, _ in heights)
    assert max(point[2] for point in kept) == max(reserved for _, reserved in heights)
    assert [point[0] for point in kept] == sorted({point[0] for point in kept})
    assert all(heights[event - 1][0] == allocated for event, allocated, _ in kept)


EVENTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3 * MIB), st.sampled_from(KINDS)), max_size=300)


@given(EVENTS)
def test_categories_add_up_at_every_point(events: list[tuple[int, int, str]]) -> None:
    """A memory that is there goes or gets another name; one that is not comes."""
    model, alive = memory(), dict[int, str]()
    for key, size, kind in events:
        if key not in alive:
            model.allocated(key, size, kind)
            alive[key] = kind
        elif alive[key] != kind:
            model.named(key, kind)
            alive[key] = kind
        else:
            model.freed(key)
            del alive[key]
    record = record_of(model)
    bands = {band.category: band.bytes for band in record.bands}
    context = bands.pop("context", ())
    assert all(amount == 200 * MIB for amount in context)
    for number, (_, allocated, _) in enumerate(record.timeline):
        held = [amounts[number] for amounts in bands.values()]
        assert sum(held) == allocated
        assert min(held, default=0) >= 0
    assert sum(record.categories.values()) == record.peak.allocated + 200 * MIB


def test_a_name_counts_from_the_beginning() -> None:
    """The state of an optimizer is named when its step has ended, and was its own before."""
    model = memory()
    model.allocated(1, 4 * MIB, "parameter")
    model.allocated(2, 8 * MIB, "temporary")
    model.allocated(3, 2 * MIB, "temporary")
    model.freed(3)  # so that the peak is left before the name is known
    model.named(2, "optimizer")
    record = record_of(model)
    bands = {band.category: band.bytes for band in record.bands}
    assert bands["optimizer"] == (0, 8 * MIB, 8 * MIB, 8 * MIB)
    assert bands["temporaries"] == (0, 0, 2 * MIB, 0)
    assert record.categories["optimizer"] == 8 * MIB


def test_steps_are_marked() -> None:
    model = memory()
    for step in range(3):
        for key in range(4):
            model.allocated(10 * step + key, MIB, "activation")
        for key in range(4):
            model.freed(10 * step + key)
        model.step()
    assert record_of(model).step_ends == (8, 16, 24)


def test_a_long_run_stays_small() -> None:
    model = memory()
    for key in range(20 * POINTS):
        model.allocated(key, MIB + key % 7 * 512, "activation")
        if key >= 3:
            model.freed(key - 3)
    record = record_of(model)
    assert POINTS <= len(record.timeline) <= 2 * POINTS
    assert all(len(band.bytes) == len(record.timeline) for band in record.bands)


def test_the_line_of_the_peak_is_told() -> None:
    model = memory()
    place = Site("/elsewhere/net.py", 7, "f")
    step = Operation("aten.relu.default", (), (), {}, "backward", "head", place)
    model.before(step)
    model.allocated(1, MIB, "temporary")
    model.after(step)
    at = record_of(model).peak_at
    assert at is not None
    assert (at.file, at.line, at.function, at.phase, at.module) == ("/elsewhere/net.py", 7, "f", "backward", "head")


def test_nothing_is_told_of_nothing() -> None:
    record = record_of(memory())
    assert record.timeline == record.bands == record.step_ends == ()
    assert record.peak_at is None
    assert record.categories == {"context": 200 * MIB}
