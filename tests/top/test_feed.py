"""The feed: everyone gets the latest, nobody has a queue, trouble is told, and an hour stays an hour."""

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.top.feed import FINEST, LONGEST_SHOWN, Feed, HardwareSample, shown
from hotloop.monitor.reading import Gpu, Host, Process, Reading

from ..thorough import tries
from .pretend import workstation


def quiet(time: float = 0.0) -> Reading:
    return Reading(time, Host(cpu=12.5), (Gpu(0, "H200", utilisation=50.0, memory_used=2**30),))


def never() -> Reading:
    raise AssertionError("nobody asked for a reading")


def test_listeners_that_wait_are_woken_by_the_next_sample_and_sent_home_at_the_end() -> None:
    async def run() -> None:
        feed = Feed(never)
        for woken in (True, False):
            waiting = [asyncio.create_task(feed.after(int(not woken), 3600)) for _ in range(5)]
            await asyncio.sleep(0)
            if woken:
                feed.take(quiet())
            else:
                feed.close()
            samples = await asyncio.wait_for(asyncio.gather(*waiting), 60)
            assert samples == ([HardwareSample(1, quiet())] * 5 if woken else [None] * 5)

    asyncio.run(run())


def test_a_listener_that_was_slow_gets_the_latest_and_what_it_missed_is_gone() -> None:
    async def run() -> None:
        feed = Feed(never)
        missed = []
        for second in range(100):
            feed.take(quiet(second))
            assert feed.latest is not None
            missed.append(weakref.ref(feed.latest))
        gc.collect()
        assert [ref() is None for ref in missed] == [True] * 99 + [False]
        sample = await feed.after(3, 60)
        assert sample is not None
        assert sample.number == 100
        assert await feed.after(100, 0.01) is None

    asyncio.run(run())


def running(read: Callable[[], Reading], until: Callable[[HardwareSample], bool]) -> list[HardwareSample]:
    """The samples of a running feed, up to one that will do."""

    async def run() -> list[HardwareSample]:
        feed = Feed(read, every=0.01)
        feed.start()
        seen: list[HardwareSample] = []
        try:
            while not seen or not until(seen[-1]):
                sample = await feed.after(seen[-1].number if seen else 0, 60)
                assert sample is not None
                seen.append(sample)
        finally:
            feed.close()
        return seen

    return asyncio.run(run())


def test_a_failed_reading_is_told_and_the_last_one_stays() -> None:
    attempts = iter(range(10**6))
    gate = threading.Event()
    threads: set[threading.Thread] = set()

    def read() -> Reading:
        threads.add(threading.current_thread())
        number = next(attempts)
        if number == 0:
            return quiet(7.0)
        if number == 1 or not gate.is_set():
            raise OSError("the driver\x1b[2J went away")
        return quiet(8.0)

    def recovered(sample: HardwareSample) -> bool:
        if sample.trouble:
            assert sample.reading == quiet(7.0)
            assert "\\u001b" not in sample.encoded
            assert "the driver" in sample.encoded
            gate.set()
        return sample.reading == quiet(8.0)

    last = running(read, recovered)[-1]
    assert last.trouble is None
    assert gate.is_set()
    strange = HardwareSample(1, Reading(0.0, Host(cpu=float("nan")), (Gpu(0, "H200", power=-float("inf")),)))
    data = json.loads(strange.encoded)["reading"]
    assert (data["host"]["cpu"], data["gpus"][0]["power"]) == (None, None), "numbers that are none"
    assert len(threads) == 1
    assert threading.main_thread() not in threads, "readings come from one other thread"


def test_a_reading_that_hangs_does_not_keep_the_feed_from_closing() -> None:
    release, inside = threading.Event(), threading.Event()

    def read() -> Reading:
        inside.set()
        release.wait(60)
        return quiet()

    async def run() -> None:
        feed = Feed(read)
        feed.start()
        await asyncio.to_thread(inside.wait, 60)
        feed.close()
        assert await feed.after(0, 60) is None

    asyncio.run(run())  # ends though the thread is still inside of the driver
    release.set()  # and what it brings then finds nobody, without a word


def test_many_hours_at_2_hz_leave_one() -> None:
    feed = Feed(never, every=0.5)
    for half in range(tries(2, 24) * 3600 * 2):
        feed.take(quiet(half / 2))
    hour = feed.hour()
    assert 3600 / FINEST <= len(hour["times"]) <= 3600 / FINEST * 1.12
    assert hour["times"][-1] - hour["times"][0] <= 3600
    assert {len(values) for values in hour["values"].values()} == {len(hour["times"])}
    assert len(json.dumps(hour)) < 100_000


def test_the_hour_has_a_list_for_each_plot_of_each_gpu() -> None:
    feed = Feed(never)
    assert feed.hour()["times"] == []
    for second in range(0, 20, 2):
        feed.take(workstation(second))
    hour = feed.hour()
    names = {"host.cpu", "host.memory_used"}
    names |= {f"gpu{i}.{name}" for i in (0, 1) for name in ("utilisation", "memory_used", "power", "temperature")}
    assert set(hour["values"]) == names
    assert hour["values"]["gpu0.power"] == [
        round(workstation(second).gpus[0].power or 0, 1) for second in range(0, 20, 2)
    ]
    feed.take(replace(workstation(3), gpus=workstation(3).gpus[1:]))
    assert feed.hour()["times"] == [workstation(3).time], "a clock that is set back begins anew"
    assert set(feed.hour()["values"]) == {name for name in names if not name.startswith("gpu0")}


@given(st.text(st.characters(), max_size=2 * LONGEST_SHOWN))
def test_foreign_strings_are_one_printable_line(foreign: str) -> None:
    process = Process(1, None, "compute", name=foreign, command=foreign, user=foreign)
    sample = HardwareSample(
        1, Reading(0.0, Host(name=foreign), (Gpu(0, foreign, processes=(process,)),), notes=(foreign,))
    )
    assert sample.encoded.isascii()
    assert sample.encoded.isprintable()
    told = json.loads(sample.encoded)["reading"]["gpus"][0]["processes"][0]["command"]
    assert len(told) <= LONGEST_SHOWN
    assert told == shown(foreign)
    assert shown(told) == told
