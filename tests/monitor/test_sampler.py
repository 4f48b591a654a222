"""The sampler as a whole: it never raises, costs little, and gives records that survive JSON."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.monitor.processes import HOST_PIDS, WHOLE_MACHINE, People
from hotloop.monitor.reading import Gpu, Process, Reading
from hotloop.monitor.sampler import Sampler

from ..thorough import tries
from ..warm import Warm
from .fakes import GIB, GPU_IS_LOST, Clock, FakeNvml

QUESTIONS = {name for name in vars(pynvml) if name.startswith(("nvmlDeviceGet", "nvmlInit", "nvmlShutdown"))}
QUESTIONS &= {"nvmlInit", "nvmlShutdown", *FakeNvml().answers((), 0)}
CODES = sorted({value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")} | {12345})


@pytest.fixture
def whole_machine(tmp_path: Path) -> People:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to(WHOLE_MACHINE)
    return People(tmp_path)


@pytest.fixture
def sampler(fake_nvml: FakeNvml, whole_machine: People, clock: Clock) -> Iterator[Sampler]:
    with Sampler(binding=fake_nvml, people=whole_machine, clock=clock) as opened:
        yield opened


def test_a_reading_of_everything_survives_json(
    sampler: Sampler, fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # the GPUs are those of the machine, whatever CUDA is told
    fake_nvml.compute = [(os.getpid(), 3 * GIB), (2**22 + 1, GIB)]
    fake_nvml.name = b"\xff\x00\x1b<b>"
    before = time.time()
    reading = sampler.read()
    assert before <= reading.time <= time.time()
    assert (reading.driver, reading.notes) == ("580.95.05", ())
    assert reading.host.memory_total
    assert [(gpu.index, gpu.uuid) for gpu in reading.gpus] == [(0, "GPU-0"), (1, "GPU-1")]
    mine, other = reading.gpus[1].processes or ()
    assert (mine.pid, mine.memory, mine.kind, mine.ours) == (os.getpid(), 3 * GIB, "compute", True)
    assert other == Process(2**22 + 1, GIB, "compute")
    assert Reading.from_json(json.loads(json.dumps(reading.to_json()))) == reading
    fake_nvml.fail("nvmlDeviceGetUtilizationRates", GPU_IS_LOST, gpu=0)
    lost, fine = sampler.read().gpus
    assert (lost.processes, len(fine.processes or ())) == (None, 2)


@settings(deadline=None, max_examples=tries(25, 150))
@given(
    st.lists(
        st.dictionaries(
            st.tuples(st.sampled_from(sorted(QUESTIONS)), st.sampled_from([None, 0, 1])),
            st.sampled_from(CODES),
            max_size=8,
        ),
        min_size=1,
        max_size=8,
    )
)
def test_whatever_fails_at_whatever_time_a_reading_comes(turns: list[dict[tuple[str, int | None], int]]) -> None:
    fake, clock = FakeNvml(), Clock()
    fake.compute = [(os.getpid(), GIB)]
    with Sampler(binding=fake, clock=clock) as sampler:
        for failures in turns:
            fake.failures = dict(failures)
            clock.now += 20
            check(sampler.read())
        fake.mend()
        clock.now += 61
        sampler.read()
        clock.now += 61  # one reading finds the library dead, the next starts it
        last = sampler.read()
    assert [gpu.error for gpu in last.gpus] == [None, None]
    assert [gpu.power for gpu in last.gpus] == [412.5] * 2
    assert fake.calls["nvmlInit"] >= fake.calls["nvmlShutdown"]


def check(reading: Reading) -> None:
    """Each value is the driver's or unknown, and a GPU that fails says so."""
    truth = {"utilisation": 97, "temperature": 61, "power": 412.5, "energy": 5000, "fan": 30, "clock": 1410}
    truth |= {"ecc_corrected": 7, "ecc_uncorrected": 0}
    for gpu in reading.gpus:
        assert gpu.memory_used in (43 * GIB, 44 * GIB, None)
        for name, value in truth.items():
            assert getattr(gpu, name) in (value, None), name
        if gpu.error is not None:
            assert gpu.utilisation is gpu.power is gpu.memory_used is gpu.processes is None
    assert reading.gpus or reading.notes


def test_calls_that_fail_in_the_middle_of_a_reading_with_what_no_binding_should_raise(whole_machine: People) -> None:
    """Not the same call all through a reading, but any call at any moment."""
    fake, clock, dice = FakeNvml(), Clock(), random.Random(0)  # noqa: S311

    def fall_over(question: str) -> None:
        if dice.random() < 0.05:
            raise dice.choice([ZeroDivisionError(), *map(pynvml.NVMLError, CODES)])

    fake.hook = fall_over
    with Sampler(binding=fake, people=whole_machine, clock=clock) as sampler:
        for _ in range(tries(200, 1000)):
            clock.now += 5
            check(sampler.read())


def test_threads_that_read_and_close_at_once(sampler: Sampler, fake_nvml: FakeNvml) -> None:
    wrong: list[object] = []
    inside = threading.Lock()

    def only_one(question: str) -> None:
        if not inside.acquire(blocking=False):
            wrong.append(f"{question} in the middle of another")
            return
        time.sleep(1e-5)  # so that others have their chance
        inside.release()

    fake_nvml.hook = only_one

    def read() -> None:
        for _ in range(10):
            try:
                wrong.extend(gpu.error for gpu in sampler.read().gpus if gpu.error)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is wrong
                wrong.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        sampler.close()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_monitor_starts_without_torch_and_does_nothing_when_it_is_made() -> None:
    code = """
import sys, threading
from hotloop.monitor.sampler import Sampler
made = Sampler()
assert "pynvml" not in sys.modules
assert threading.active_count() == 1
made.read()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_benchmark_of_what_a_reading_costs(tmp_path: Path, warm: Warm) -> None:
    benchmark = Path(__file__).resolve().parents[2] / "benchmarks" / "sampler_cost.py"
    done = warm.run(benchmark, "--quick", "--json", tmp_path / "r.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "r.json").read_text())
    assert 0 < figures["median"] <= figures["p95"] <= figures["longest"]


@pytest.mark.gpu
def test_the_real_gpu_and_this_process_on_it() -> None:
    import torch

    held = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    with Sampler() as sampler:
        first = sampler.read()
        time.sleep(0.5)
        reading = sampler.read()
    gpu = next(gpu for gpu in reading.gpus if gpu.uuid == uuid)
    assert reading.driver
    assert gpu.error is None
    assert gpu.name == torch.cuda.get_device_name(0)
    for name in ("memory_used", "memory_free", "memory_total", "utilisation", "temperature", "power", "clock"):
        assert getattr(gpu, name) is not None, name
    assert (gpu.memory_used or 0) >= held.numel()
    assert (gpu.memory_total or 0) >= torch.cuda.get_device_properties(0).total_memory * 0.95
    assert [f.name for f in fields(Gpu) if getattr(first.gpus[0], f.name) == ""] == []
    mine = [process for process in gpu.processes or () if process.ours]
    if not gpu.processes:
        pytest.skip("this driver tells of no process, as in some containers")
    if not mine and HOST_PIDS in reading.notes:
        pytest.skip("other processes of the host share the GPU, and which is this one cannot be told")
    assert [process.pid for process in mine] == [os.getpid()]
    assert mine[0].memory is None or mine[0].memory >= held.numel()


@pytest.mark.gpu
def test_copies_over_pcie_are_seen() -> None:
    import torch

    data = torch.empty(GIB, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(data, device="cuda")
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"

    def received(reading: Reading) -> float | None:
        return next(gpu.received for gpu in reading.gpus if gpu.uuid == uuid)

    with Sampler() as sampler:
        first = received(sampler.read())
        seen, copied, begin = first, 0, time.monotonic()
        while seen == first and time.monotonic() - begin < 20:  # without counters it is asked every 13 s
            for _ in range(8):
                target.copy_(data, non_blocking=True)
            seen = received(sampler.read())  # while they are copied: without counters the driver watches the bus
            torch.cuda.synchronize()
            copied += 8 * GIB
        rate = copied / (time.monotonic() - begin)
    if seen is None:
        pytest.skip("this driver does not tell of PCIe")
    assert rate / 3 < seen < rate * 3


@pytest.mark.gpu
def test_a_reading_of_the_real_gpu_is_quick() -> None:
    with Sampler() as sampler:
        sampler.read()
        times = []
        for _ in range(40):
            time.sleep(0.05)
            begin = time.perf_counter()
            reading = sampler.read()
            times.append(time.perf_counter() - begin)
    assert sorted(times)[len(times) // 2] < 0.005 * max(1, len(reading.gpus))
