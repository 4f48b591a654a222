"""Two clocks and what joins them, for any list of events; and the forecast that is read from them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.simulate.cards import card, generic
from hotloop.apps.simulate.events import Listener, Operation, Shape
from hotloop.apps.simulate.simulation_record import StepTime
from hotloop.apps.simulate.table import ArchitectureTable, Curve, HostCost, default_host, default_table
from hotloop.apps.simulate.timeline import Event, Forecast, Launch, Mark, Time, Transfer, Wait, forecast, play
from hotloop.apps.simulate.work import WorkPart
from hotloop.placement.sites import Site

H200 = card("h200")
TABLE = default_table()
HOST = HostCost()
ANY = default_host()
IDLE = HostCost(0, 0, 0, 0, 0, 0, 0, 0, 0)
HERE = Site("train.py", 7)

parts = st.builds(
    WorkPart,
    family=st.sampled_from(["pointwise", "norm", "optimizer-foreach"]),
    bytes=st.floats(0, 1e9),
    kernels=st.integers(1, 50),
)
events = st.lists(
    st.one_of(
        st.builds(
            Launch,
            st.lists(parts, min_size=1, max_size=2).map(tuple),
            st.sampled_from(["forward", "backward", "optimizer", "other"]),
            st.integers(0, 50),
        ),
        st.builds(Transfer, st.integers(0, 10**9), st.booleans(), st.booleans()),
        st.just(Wait()),
        st.just(Mark()),
    ),
    max_size=40,
)


def price(part: WorkPart) -> float:
    return 1e-6 + part.bytes / 4e12


def add(bytes_: int = 2**30, phase: str = "forward") -> Operation:
    tensor = Shape((bytes_ // 4,), "float32", 4)
    return Operation("aten.add.Tensor", (tensor, tensor), (tensor,), {}, phase, "", HERE)


def told(time: Time, steps: int = 3, *, operations: int = 10, size: int = 2**20, wait: bool = False) -> Time:
    for _ in range(steps):
        for _ in range(operations):
            time.before(add(size))
            time.after(add(size))
        if wait:
            time.waited("item", HERE)
        time.step()
    return time


@given(events)
def test_a_step_is_at_least_as_long_as_the_work_of_the_device(happened):
    steps = play(happened, H200, TABLE, price, host=HOST)
    assert len(steps) == happened.count(Mark())
    assert all(seconds >= 0 for seconds in steps)
    marks = [number for number, event in enumerate(happened) if event == Mark()]
    for count, mark in enumerate(marks, 1):  # from the beginning, since a step may owe what an earlier one queued
        whole = sum(steps[:count]) * (1 + 1e-9) + 1e-12
        launched = [event for event in happened[:mark] if isinstance(event, Launch)]
        assert whole >= sum(price(part) for launch in launched for part in launch.parts)


@given(events, st.sampled_from([Wait(), Transfer(10, pinned=True, blocking=True), Transfer(10, False, False)]))
def test_after_a_wait_the_device_has_nothing_left_to_do(happened, wait):
    then: list[Event] = [*happened, wait, Mark(), Mark()]
    assert play(then, H200, TABLE, price, host=HOST)[-1] == 0.0  # so nothing came due after the host was let go


@given(events, st.integers(0, 40))
def test_another_wait_never_makes_it_shorter(happened, where):
    more = [*happened[:where], Wait(), *happened[where:]]
    shorter, longer = (play([*each, Mark()], H200, TABLE, price, host=HOST) for each in (happened, more))
    assert sum(longer) * (1 + 1e-9) >= sum(shorter)


@given(events, st.floats(1, 10))
def test_a_slower_device_host_or_link_is_never_quicker(happened, factor):
    def total(**changes: object) -> float:
        given_ = {"card": H200, "price": price, "host": HOST} | changes
        return sum(play([*happened, Mark()], table=TABLE, **given_))  # type: ignore[arg-type]

    now = total()
    assert total(price=lambda part: factor * price(part)) * (1 + 1e-9) >= now
    assert total(host=replace(HOST, forward=HOST.forward * factor, wait=HOST.wait * factor)) * (1 + 1e-9) >= now
    assert total(card=replace(H200, pcie=H200.pcie / factor)) * (1 + 1e-9) >= now


def test_a_pinned_copy_that_does_not_block_lets_the_host_go_on():
    busy = [Launch((), "forward")] * 10_000  # of the host alone
    for pinned, blocking, waits in [
        (True, False, False),
        (True, True, True),
        (False, False, True),
        (False, True, True),
    ]:
        copy = Transfer(10**9, pinned, blocking)
        [alone], [step], [work] = (
            play([*first, *more, Mark()], H200, TABLE, price, host=HOST)
            for first, more in (([copy], []), ([copy], busy), ([], busy))
        )
        assert step == pytest.approx(alone + work if waits else max(alone, work), rel=0.01)


def predicted(tape: Time, **options: object) -> Forecast:
    found = forecast(tape, H200, TABLE, **options)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_it_is_a_listener_and_tells_nothing_before_the_first_step():
    time: Listener = Time(H200)
    time.after(add())
    assert isinstance(time, Time)
    assert time.to_record() == {}


def test_the_first_step_does_not_count_where_there_are_others():
    time = Time(H200)
    for _ in range(100):
        time.after(add())
    once = predicted(told(Time(H200), 4)).step.median
    assert predicted(told(time, 4)).step.median == pytest.approx(once)
    alone = predicted(told(Time(H200), 1))
    assert any("only one step" in note for note in alone.notes)


def test_large_work_is_bound_by_the_device_and_small_work_by_launches():
    large, small = predicted(told(Time(H200), size=2**30)), predicted(told(Time(H200), size=2**10))
    assert (large.limited_by, small.limited_by) == ("device", "launches")
    slow = predicted(told(Time(H200), size=2**10), host=replace(ANY, forward=2 * ANY.forward))
    assert slow.step.median - small.step.median == pytest.approx(1e3 * 10 * ANY.forward, rel=0.01)


def test_copies_can_be_what_bounds():
    tape = Time(H200)
    for _ in range(3):
        tape.after(add(2**10))
        tape.copied(10**9, "to the device", pinned=False, blocking=True, place=HERE)
        tape.step()
    assert predicted(tape).limited_by == "copies"


@pytest.mark.parametrize(("workers", "waits"), [(0, True), (4, True), (4000, False)])
def test_data_that_takes_longer_than_a_step_is_noted(workers: int, waits: bool):
    tape = Time(H200)
    for seconds in (9.0, 0.12, 0.12):  # the first step does not count
        tape.loaded(seconds, workers)
        tape.after(add(2**10))
        tape.step()
    words = f"the GPU waits for data: batches take {120 / max(workers, 1):.3g} ms a step on this machine"
    assert (words in tape.to_record()["notes"]) == waits


@pytest.mark.parametrize(
    ("forward", "backward", "tensors", "milliseconds"),
    [  # a Gemma-2 and two T5 on an H200, two of them beside another host as well
        (675, 1012, 870, 26.6),
        (675, 1012, 870, 37.3),
        (861, 1249, 1198, 36.5),
        (1396, 2230, 2206, 65.7),
        (1396, 2230, 2206, 106.8),
    ],
)
def test_steps_that_the_host_limits_lie_in_their_interval(
    forward: int, backward: int, tensors: int, milliseconds: float
) -> None:
    tape, short = Time(H200), (WorkPart("pointwise", bytes=1e3),)
    for _ in range(3):
        tape.events += [Launch(short, "forward")] * forward + [Launch(short, "backward")] * backward
        tape.events += [Launch(short, "optimizer", tensors // 8)] * 8
        tape.step()
    step = predicted(tape).step
    assert step.low < milliseconds < step.high
    assert step.high < 2.7 * step.low


def test_every_card_has_the_same_host():
    """A small training waits for the host, so that no card is quicker than another, measured or not."""
    small, large = told(Time(H200), operations=40, size=2**10), told(Time(H200), size=2**30)
    forecasts = [forecast(small, card(name)) for name in ("t4", "rtx4090", "h200")]
    steps = [found.step.median for found in forecasts if found is not None]
    assert max(steps) < 1.05 * min(steps)
    assert all(any("Intel Xeon" in note for note in found.notes) for found in forecasts if found is not None)
    t4, h200 = (forecast(large, card(name)).step for name in ("t4", "h200"))  # type: ignore[union-attr]
    assert h200.high < t4.low


def test_the_interval_holds_the_median_and_is_wider_for_a_card_that_was_not_measured():
    tape = told(Time(H200), size=2**28)
    curves = {"pointwise": Curve(latency=2e-6, memory=0.9, spread=0.05)}
    measured = ArchitectureTable("hopper", "h200", common=0.03, curves=curves)

    def width(step: StepTime) -> float:
        assert step.low < step.median < step.high
        return step.high / step.low

    own, kin, unknown = (
        forecast(tape, on, table).step  # type: ignore[union-attr]
        for on, table in ((H200, measured), (card("h100"), measured), (H200, TABLE))
    )
    assert own.calibrated
    assert not kin.calibrated
    assert not unknown.calibrated
    assert width(own) < width(kin) < width(unknown)
    assert any("rule of thumb" in note for note in predicted(tape).notes)
    assert any("only the memory" in note for note in forecast(tape, generic("24GiB")).notes)  # type: ignore[union-attr]


def test_errors_add_up_within_a_family_and_level_out_between_families():
    def relative(families: list[str]) -> float:
        curves = {name: Curve(latency=0.0, memory=0.9, spread=0.2) for name in families}
        table = ArchitectureTable("hopper", "h200", common=0.0, curves=curves, floor=0.0)
        tape = Time(H200)
        for _ in range(3):
            for name in families * 8:
                tape.events.append(Launch((WorkPart(name, bytes=2e9),), "forward"))
            tape.step()
        step = forecast(tape, H200, table, host=IDLE).step  # type: ignore[union-attr]
        return (step.high - step.median) / step.median

    one, four = relative(["pointwise"]), relative(["pointwise", "norm", "copy", "gather"])
    assert one == pytest.approx(1.2816 * (2.718281828**0.2 - 1), rel=0.01)
    assert four == pytest.approx(one / 2, rel=0.01)


def test_what_is_unknown_is_noted_once():
    tape = Time(H200)
    for _ in range(3):
        tape.after(replace(add(), name="somebodys.operation.default"))
        tape.step()
    assert sum("somebodys.operation" in note for note in predicted(tape).notes) == 1


def test_tf32_makes_products_quicker_where_it_is_allowed(monkeypatch):
    a = Shape((4096, 4096), "float32", 4)
    times = []
    for precision in ("highest", "high"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        tape = Time(H200)
        for _ in range(3):
            tape.after(Operation("aten.mm.default", (a, a), (a,)))
            tape.step()
        times.append(predicted(tape).step.median)
    assert times[1] < times[0] / 3


def test_what_the_host_does_while_the_device_is_still_busy_with_the_step_before_costs_nothing():
    tape = Time(H200)
    for _ in range(2):
        for _ in range(20):
            tape.after(add(2**10))
        tape.after(add(2**32))
        tape.step()
    found = predicted(tape)
    tape = told(Time(H200), 2, operations=1, size=2**32)
    assert found.step.median == pytest.approx(predicted(tape).step.median, rel=0.02)  # the host takes 7%


def test_a_step_costs_the_host_something_beside_its_operations():
    idle, busy = predicted(told(Time(H200), operations=0)), predicted(told(Time(H200), operations=1, size=2**10))
    assert 0 < idle.step.median < busy.step.median


def test_errors_of_many_unlike_operations_even_out_on_a_measured_card():
    curves = {"pointwise": Curve(latency=2e-6, memory=0.9, spread=0.3)}
    table = replace(TABLE, card="h200", curves=curves, common=0.0)

    def width(sizes: list[int]) -> float:
        tape = Time(H200)
        for _ in range(3):
            for size in sizes:
                tape.after(add(size))
            tape.step()
        found = forecast(tape, H200, table, host=IDLE)
        assert found is not None
        return (found.step.high - found.step.low) / found.step.median

    alike, unlike = [2**30] * 8, [2**30 + 4 * number for number in range(8)]
    assert width(unlike) < 0.8 * width(alike)
