"""`Watching`: adds up exactly, stops exactly, and never harms what it watches."""

import itertools
import json
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.errors import BadArgument
from hotloop.monitor.load import LoadTally
from hotloop.monitor.reading import Gpu, Host, Process, Reading
from hotloop.monitor.watching import Watching, watch
from hotloop.records import GpuLoad, Load

from ..thorough import tries

HOST = Host(cpu=25.0)
GPU = Gpu(0, "H200", uuid="GPU-abc", utilisation=80.0, memory_used=100, memory_total=1000, power=300.0)
OURS = Process(1, 5, "compute", ours=True)


def added(*gpus: Gpu, every: float = 0.5, wanted: list[int | str] | None = None) -> Load:
    """The load of readings of one GPU each, one after another."""
    tally = LoadTally(wanted)
    for number, gpu in enumerate(gpus):
        tally.add(Reading(1e9, HOST, (gpu,)), 1000 + number * every)
    return tally.load()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what must happen, however slow the machine is."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


def test_a_load() -> None:
    hot = replace(GPU, utilisation=100.0, memory_used=400, power=500.0, temperature=80.0, throttled=("heat",))
    load = added(replace(GPU, temperature=60.0, throttled=()), hot, replace(GPU, throttled=None), hot)
    assert (load.seconds, load.samples, load.cpu) == (1.5, 4, 25.0)
    (gpu,) = load.gpus
    assert (gpu.index, gpu.name, gpu.uuid, gpu.memory_total) == (0, "H200", "GPU-abc", 1000)
    assert (gpu.utilisation, gpu.memory_peak, gpu.power, gpu.temperature) == (90.0, 400, 400.0, 80.0)
    assert gpu.throttled == pytest.approx(2 / 3)  # of those samples in which it was known
    assert gpu.reasons == {"heat": pytest.approx(2 / 3)}
    assert Load.from_json(json.loads(json.dumps(load.to_json()))) == load


def test_what_is_not_known_stays_unknown() -> None:
    (gpu,) = added(Gpu(0, "old"), Gpu(0, "old")).gpus
    assert gpu == GpuLoad(0, "old")
    empty = LoadTally().load()
    assert (empty.seconds, empty.samples, empty.gpus, empty.cpu, empty.joules) == (0.0, 0, (), None, None)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300))
def test_mean_and_percentile_of_the_utilisation(percents: list[float]) -> None:
    (gpu,) = added(*(replace(GPU, utilisation=percent) for percent in percents)).gpus
    assert gpu.utilisation == pytest.approx(np.mean(percents))
    exact = np.percentile(percents, 95, method="inverted_cdf")
    assert gpu.utilisation_p95 == pytest.approx(exact, abs=0.51)


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(0.01, 9.9)), min_size=2, max_size=30))
def test_energy_is_power_over_time_where_there_is_no_counter(samples: list[tuple[float, float]]) -> None:
    tally, now, moments = LoadTally(), 50.0, []
    for watts, passed in samples:
        now += passed
        tally.add(Reading(0.0, HOST, (replace(GPU, power=watts),)), now)
        moments.append((now, watts))
    (gpu,) = tally.load().gpus
    area = sum((later - now) * (one + other) / 2 for (now, one), (later, other) in itertools.pairwise(moments))
    assert gpu.joules == pytest.approx(area, abs=1e-6)
    assert gpu.energy_from == "power"


def test_the_counter_goes_before_power() -> None:
    load = added(*(replace(GPU, energy=7000.0 + number * 200) for number in range(5)))
    assert load.gpus[0].joules == 800.0  # and not 300 W × 2 s
    assert load.gpus[0].energy_from == "counter"
    assert load.joules_per(4000) == 200.0
    assert load.joules_per(4000, per=1) == 0.2
    assert load.joules_per(0) is None
    (known,), unknown = load.gpus, GpuLoad(1, "b")
    assert replace(load, gpus=(known, replace(known, index=1))).joules == 1600.0
    assert replace(load, gpus=(known, unknown)).joules is None, "known only if that of each is"


def test_power_fills_in_where_the_counter_lags_begins_late_or_falls() -> None:
    lagging = [10.0, 10.0, 10.0, 610.0, 610.0, 610.0]
    assert added(*(replace(GPU, energy=e) for e in lagging)).joules == 600.0 + 300  # the last second by power
    late = [None, None, None, 50.0, 250.0]
    assert added(*(replace(GPU, energy=e) for e in late)).joules == 450.0 + 200
    tally = LoadTally()
    for now in (0.0, 1.0, 30_000.0, 30_001.0):
        tally.add(Reading(0.0, HOST, (GPU,)), now)
    assert tally.load().joules == 600.0, "a night asleep is not filled"
    loaded_anew = [900.0, 1000.0, 2.0, 102.0]
    assert added(*(replace(GPU, energy=e) for e in loaded_anew)).joules == 100.0 + 150 + 100


def test_which_gpus_are_told_of_and_of_those_that_fail_once_what() -> None:
    def indices(wanted: list[int | str] | None, *gpus: Gpu) -> list[int]:
        tally = LoadTally(wanted)
        tally.add(Reading(0.0, HOST, gpus), 0.0)
        return [gpu.index for gpu in tally.load().gpus]

    other, third = replace(GPU, index=1, uuid="GPU-def"), Gpu(2, "x")
    assert indices(None, third, GPU, other) == [0, 1, 2]
    assert indices(None, GPU, replace(other, processes=(OURS,))) == [1]
    assert indices([0], GPU, replace(other, processes=(OURS,))) == [0]
    assert indices(["def"], GPU, other, third) == indices(["GPU-def"], GPU, other, third) == [1]
    assert indices([], GPU) == []
    tally, lost = LoadTally(), Gpu(0, "H200", error="lost\x1b")
    for number in range(100):
        tally.add(Reading(0.0, HOST, (lost,), notes=("no NVML", f"note {number}")), float(number))
    notes = tally.load().notes
    assert (notes[:2], len(notes) <= 8) == (("GPU 0: lost\\x1b", "no NVML"), True)


def test_a_day_is_added_up_in_the_memory_of_a_minute() -> None:
    tally, sizes, samples = LoadTally(), list[int](), tries(6, 24) * 3600 * 2  # usually of a quarter of the day
    minute = [Reading(0.0, HOST, (replace(GPU, utilisation=float(k % 101), energy=float(k)),)) for k in range(120)]
    for number in range(samples):
        tally.add(minute[number % 120], number / 2)
        if number in (120, samples - 1):
            sizes.append(len(pickle.dumps(tally)))
    assert sizes[1] < sizes[0] * 1.2
    assert tally.load().samples == samples


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.monitor.watching.LAST_READING", 120.0)  # a loaded machine is not a driver that hangs


class Source:
    """Readings to be watched, which remember who asked."""

    def __init__(self, *failures: int) -> None:
        self.threads: list[int] = []
        self.failures = failures

    def __call__(self) -> Reading:
        self.threads.append(threading.get_ident())
        if len(self.threads) in self.failures:
            raise OSError(f"broken {len(self.threads)}")
        return Reading(time.time(), HOST, (replace(GPU, energy=100.0 * len(self.threads)),))


def test_only_the_thread_does_any_work_and_not_more_often_than_asked() -> None:
    source, begin = Source(), time.monotonic()
    with Watching(source, every=0.01) as watching:
        until(lambda: watching.load.samples >= 5)
        assert watching.latest is not None
    assert len(set(source.threads)) == 1
    assert threading.get_ident() not in source.threads
    assert watching.load.samples == len(source.threads) <= (time.monotonic() - begin) / 0.01 + 2


def test_it_stops_exactly_after_a_last_reading() -> None:
    source = Source()
    watching = Watching(source, every=3600.0).start()
    until(lambda: watching.load.samples == 1)
    load = watching.stop()  # far from the next sample
    assert load.samples == 2
    assert load.joules == 100.0
    assert watching.stop() == load == watching.load
    with pytest.raises(BadArgument, match="before"):
        watching.start()
    assert Watching(source).stop().samples == 0  # never begun
    for wrong in (0, math.nan, math.inf):
        with pytest.raises(BadArgument, match="every"):
            Watching(source, every=wrong)
    assert not [thread for thread in threading.enumerate() if thread.name == "hotloop watch"]
    assert len(source.threads) == 2


def test_a_reading_that_was_under_way_is_not_the_last() -> None:
    source = Source()

    def read() -> Reading:
        if not source.threads:
            threading.Thread(target=watching.stop).start()
            until(watching._ending.is_set)
        return source()

    watching = Watching(read, every=3600.0)
    watching.start()
    assert watching.stop().samples == 2


def test_failed_readings_are_noted_and_the_others_count_and_errors_of_the_training_pass_through() -> None:
    source = Source(1, 3)
    with pytest.raises(KeyError, match="mine"), Watching(source, every=0.001) as watching:  # noqa: PT012
        until(lambda: watching.load.samples >= 3)
        raise KeyError("mine")
    assert watching.load.samples == len(source.threads) - 2
    assert watching.load.notes == ("a reading failed: OSError: broken 1", "a reading failed: OSError: broken 3")


def test_a_driver_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.monitor.watching.LAST_READING", 0.05)
    entered, leave = threading.Event(), threading.Event()

    def read() -> Reading:
        entered.set()
        leave.wait()
        return Reading(0.0, HOST)

    watching = Watching(read).start()
    assert entered.wait(120)
    load = watching.stop()
    assert load.samples == 0
    assert "was not waited for" in load.notes[0]
    leave.set()
    until(lambda: not any(thread.name == "hotloop watch" for thread in threading.enumerate()))
    assert watching.load == load  # what came too late is not counted


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_neither_watches_nor_hangs_and_a_program_that_does_not_stop_ends() -> None:
    code = """
import os, time
from hotloop.monitor.reading import Host, Reading
from hotloop.monitor.watching import Watching

with Watching(lambda: Reading(time.time(), Host()), every=0.001) as watching:
    while watching.load.samples < 3:
        time.sleep(0.01)
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        before = watching.load.samples
    else:
        seen = watching.load.samples
        time.sleep(0.05)
        os._exit(watching.stop().samples != seen)
assert watching.load.samples > before
Watching(lambda: time.sleep(10_000)).start()
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (ended.stdout, ended.stderr) == ("done\n", "")


class Broken:
    """A log whose disk is full."""

    def __init__(self) -> None:
        self.calls = self.closed = 0

    def write(self, *_: object, **__: object) -> None:
        self.calls += 1
        raise OSError("full")

    def close(self) -> None:
        self.closed += 1


def test_every_sample_goes_to_the_logs_of_which_one_may_break(tmp_path: Path) -> None:
    broken, files, steps = Broken(), [tmp_path / "run.jsonl", tmp_path / "other.jsonl"], itertools.count(100)
    with Watching(Source(), every=0.001, log=[files[0], broken, files[1]], step=lambda: next(steps)) as watching:
        until(lambda: watching.load.samples >= 3)
    lines = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert len(lines) == watching.load.samples
    assert [line["step"] for line in lines] == list(range(100, 100 + len(lines)))
    assert (lines[0]["gpu0/utilisation"], lines[0]["host/cpu"]) == (80.0, 25.0)
    assert files[1].read_text().count('"gpu0/utilisation"') == len(lines)
    assert watching.load.notes == ("the log is not written any more: OSError: full",)
    assert (broken.calls, broken.closed) == (1, 0)


def test_what_is_no_log_or_cannot_be_opened_is_said_before_anything_is_watched(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot write"), Watching(Source(), log=tmp_path / "file" / "x.jsonl"):
        pytest.fail("it began")
    with pytest.raises(BadArgument, match="no `write` and `close`"):
        watch(log=[tmp_path / "run.jsonl", 3])  # type: ignore[list-item]
    assert not (tmp_path / "run.jsonl").exists()


@pytest.mark.gpu
def test_watching_a_gpu_at_work() -> None:
    import torch

    square = torch.randn(8192, 8192, device="cuda")  # 256 MiB

    with watch(every=0.1) as watching:
        until(lambda: watching.load.samples >= 1)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            square @ square
            torch.cuda.synchronize()
    load = watching.load
    used = max(load.gpus, key=lambda gpu: gpu.utilisation or 0.0)
    assert load.samples >= 5
    assert (used.utilisation_p95 or 0) > 50
    assert (used.memory_peak or 0) >= square.nbytes
    assert (used.joules or 0) > 10
    assert used.energy_from in ("counter", "power")


def test_where_no_gpu_is_wanted_their_driver_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.monitor.sampler.Sampler", None)
    with Watching(gpus=()) as watching:
        pass
    assert watching.load.samples > 0
    assert watching.load.notes == ()
