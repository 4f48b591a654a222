"""The gate to NVML: what it tells, what it keeps, and how it fails."""

import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pynvml
import pytest

from hotloop.monitor.card import LEAST, SELDOM, in_words
from hotloop.monitor.failures import KINDS, WORDS, Dead, Lost, Passing, Unsupported, judged
from hotloop.monitor.foreign import LONGEST_COMMAND, decoded
from hotloop.monitor.nvml_gate import FIRST_PAUSE, LONGEST_PAUSE, Nvml
from hotloop.monitor.reading import Gpu

from .fakes import GIB, GPU_IS_LOST, MISMATCH, NOT_SUPPORTED, UNINITIALIZED, UNKNOWN, Clock, FakeNvml

NO_PERMISSION, TIMEOUT, LIBRARY_NOT_FOUND = 4, 10, 12


@pytest.fixture
def nvml(fake_nvml: FakeNvml, clock: Clock) -> Iterator[Nvml]:
    opened = Nvml(fake_nvml, clock=clock)
    yield opened
    opened.close()


def gpus(nvml: Nvml) -> list[Gpu]:
    return [seen.gpu for seen in nvml.read()[0]]


def test_everything_that_the_driver_tells(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    nvml.read()
    clock.now += 2
    fake_nvml.pcie = [4000, 9000]
    seen, notes = nvml.read()
    assert notes == []
    assert nvml.driver == "580.95.05"
    assert [each.gpu.index for each in seen] == [0, 1]
    assert seen[0].gpu == Gpu(
        index=0,
        name="NVIDIA H200",
        uuid="GPU-0",
        utilisation=97.0,
        memory_used=43 * GIB,
        memory_free=100 * GIB,
        memory_total=144 * GIB,
        temperature=61.0,
        fan=30.0,
        power=412.5,
        power_limit=700.0,
        energy=5000.0,
        clock=1410.0,
        clock_most=1980.0,
        memory_clock=3201.0,
        memory_clock_most=3201.0,
        throttled=(),
        sent=2000.0,
        received=4500.0,
        ecc_corrected=7,
        ecc_uncorrected=0,
    )


def test_handles_and_facts_are_fetched_once(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    for _ in range(20):
        clock.now += 0.5
        nvml.read()
    for question in ("nvmlInit", "nvmlDeviceGetCount", "nvmlSystemGetDriverVersion"):
        assert fake_nvml.calls[question] == 1, question
    for question in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlDeviceGetUUID"):
        assert fake_nvml.calls[question] == 2, question
    assert fake_nvml.calls["nvmlDeviceGetMaxClockInfo"] == 4
    assert fake_nvml.calls["nvmlDeviceGetEnforcedPowerLimit"] == 2
    assert fake_nvml.calls["nvmlDeviceGetUtilizationRates"] == 40


def test_a_power_limit_that_was_changed_is_seen_in_a_while(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    assert gpus(nvml)[0].power_limit == 700
    fake_nvml.power_limit = 350_000
    clock.now += SELDOM
    assert gpus(nvml)[0].power_limit == 350


def test_a_power_limit_that_was_not_told_once_is_asked_for_again_at_once(nvml: Nvml, fake_nvml: FakeNvml) -> None:
    fake_nvml.fail("nvmlDeviceGetEnforcedPowerLimit", TIMEOUT)
    assert gpus(nvml)[0].power_limit is None
    fake_nvml.mend()
    assert gpus(nvml)[0].power_limit == 700


@pytest.mark.parametrize(
    ("question", "field"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilisation"),
        ("nvmlDeviceGetFanSpeed", "fan"),
        ("nvmlDeviceGetPowerUsage", "power"),
        ("nvmlDeviceGetTotalEnergyConsumption", "energy"),
        ("nvmlDeviceGetTotalEccErrors", "ecc_corrected"),
        ("nvmlDeviceGetUUID", "uuid"),
        ("nvmlDeviceGetClockInfo", "clock"),
        ("nvmlDeviceGetMaxClockInfo", "clock_most"),
    ],
)
@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, TIMEOUT, UNKNOWN])
def test_a_question_that_fails_loses_that_answer_alone(
    nvml: Nvml, fake_nvml: FakeNvml, question: str, field: str, code: int
) -> None:
    fake_nvml.fail(question, code)
    gpu = gpus(nvml)[0]
    assert getattr(gpu, field) is None
    assert gpu.error is None
    assert gpu.memory_used == 43 * GIB
    assert gpu.temperature == 61


def test_what_is_not_supported_is_seldom_asked_again(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    fake_nvml.fail("nvmlDeviceGetFanSpeed", NOT_SUPPORTED)
    for _ in range(10):
        nvml.read()
    assert fake_nvml.calls["nvmlDeviceGetFanSpeed"] == 2  # once for each GPU
    fake_nvml.mend()
    assert gpus(nvml)[0].fan is None
    clock.now += SELDOM
    assert gpus(nvml)[0].fan == 30


def test_what_fails_in_passing_is_said_and_asked_again(nvml: Nvml, fake_nvml: FakeNvml) -> None:
    fake_nvml.fail("nvmlDeviceGetFanSpeed", UNKNOWN, gpu=1)
    assert [note for note in nvml.read()[1] if "GPU 1" in note and "nvmlDeviceGetFanSpeed" in note]
    fake_nvml.mend()
    seen, notes = nvml.read()
    assert seen[1].gpu.fan == 30
    assert notes == []


@pytest.mark.parametrize(
    ("new", "old", "field"),
    [
        ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", "temperature"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons", "throttled"),
    ],
)
def test_an_old_driver_is_asked_in_the_old_way(nvml: Nvml, fake_nvml: FakeNvml, new: str, old: str, field: str) -> None:
    fake_nvml.fail(new, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    nvml.read()
    assert getattr(gpus(nvml)[0], field) is not None
    assert fake_nvml.calls[new] == 2
    assert fake_nvml.calls[old] == 4


def test_memory_that_the_driver_keeps_for_itself_is_not_used_where_the_driver_tells_it_apart(
    fake_nvml: FakeNvml, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpus(Nvml(fake_nvml, clock=clock))[0].memory_used == 43 * GIB
    whole = fake_nvml._memory

    def old(version: int | None = None) -> Any:
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return whole()

    monkeypatch.setattr(fake_nvml, "_memory", old)
    gpu = gpus(Nvml(fake_nvml, clock=clock))[0]
    assert (gpu.memory_used, gpu.error) == (44 * GIB, None)


@pytest.mark.parametrize(
    ("question", "code"),
    [
        ("nvmlDeviceGetUtilizationRates", GPU_IS_LOST),
        ("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_RESET_REQUIRED),
        ("nvmlDeviceGetMemoryInfo", UNKNOWN),
    ],
)
def test_a_gpu_that_fails_has_an_error_and_the_others_go_on(
    nvml: Nvml, fake_nvml: FakeNvml, question: str, code: int
) -> None:
    nvml.read()
    fake_nvml.fail(question, code, gpu=0)
    seen, notes = nvml.read()
    assert seen[0].gpu.error
    assert (seen[0].gpu.name, seen[0].gpu.uuid) == ("NVIDIA H200", "GPU-0")
    assert seen[0].gpu.utilisation is None
    assert seen[0].holders is None
    assert seen[1].gpu.error is None
    assert seen[1].gpu.utilisation == 97
    assert notes == []


def test_a_gpu_that_comes_back_is_seen_after_a_pause(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    nvml.read()
    fake_nvml.fail("nvmlDeviceGetUtilizationRates", GPU_IS_LOST, gpu=0)
    assert "fell off the bus" in str(gpus(nvml)[0].error)
    fake_nvml.mend()
    assert gpus(nvml)[0].error  # it is left alone for a while
    clock.now += FIRST_PAUSE
    assert gpus(nvml)[0].error is None
    assert fake_nvml.calls["nvmlInit"] == 2


def test_a_gpu_that_is_lost_from_the_beginning(nvml: Nvml, fake_nvml: FakeNvml) -> None:
    fake_nvml.fail("nvmlDeviceGetHandleByIndex", GPU_IS_LOST, gpu=1)
    first, second = gpus(nvml)
    assert first.error is None
    assert second.error
    assert second.index == 1


def test_a_gpu_that_is_taken_out_is_told_of_until_it_is_put_back(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    nvml.read()
    fake_nvml.fail("nvmlDeviceGetUtilizationRates", GPU_IS_LOST, gpu=1)
    nvml.read()
    fake_nvml.mend()
    fake_nvml.gpus = 1
    for _ in range(3):
        clock.now += LONGEST_PAUSE
        seen, notes = nvml.read()
        assert [each.gpu.error for each in seen] == [None]
        assert len(notes) == 1
        assert "GPU 1" in notes[0]
        assert "not there any more" in notes[0]
    fake_nvml.gpus = 2
    clock.now += LONGEST_PAUSE
    seen, notes = nvml.read()
    assert [each.gpu.error for each in seen] == [None, None]
    assert notes == []


@pytest.mark.parametrize("code", [UNINITIALIZED, MISMATCH, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_nvml_that_dies_in_the_middle_is_said_and_started_again(
    nvml: Nvml, fake_nvml: FakeNvml, clock: Clock, code: int
) -> None:
    nvml.read()
    fake_nvml.fail("nvmlDeviceGetPowerUsage", code)
    fake_nvml.fail("nvmlInit", code)
    for _ in range(3):
        seen, notes = nvml.read()
        assert [each.gpu.name for each in seen] == ["NVIDIA H200"] * 2
        assert all(each.gpu.error for each in seen)
        assert len(notes) == 1
    fake_nvml.mend()
    clock.now += LONGEST_PAUSE
    seen, notes = nvml.read()
    assert notes == []
    assert [each.gpu.error for each in seen] == [None, None]
    assert seen[1].gpu.power == 412.5


def test_the_pauses_between_attempts_grow(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    fake_nvml.fail("nvmlInit", MISMATCH)
    begun = []
    for _ in range(3000):  # ten minutes
        before = fake_nvml.calls["nvmlInit"]
        nvml.read()
        if fake_nvml.calls["nvmlInit"] > before:
            begun.append(clock.now)
        clock.now += 0.2
    pauses = [later - earlier for earlier, later in pairwise(begun)]
    assert len(pauses) >= 10
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(FIRST_PAUSE, abs=0.3)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE, abs=0.3)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (LIBRARY_NOT_FOUND, "no NVIDIA driver"),
        (MISMATCH, "was updated"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded"),
        (NO_PERMISSION, "may not"),
        (UNKNOWN, "Unknown"),
    ],
)
def test_a_library_that_does_not_start_is_explained_in_one_sentence(
    nvml: Nvml, fake_nvml: FakeNvml, code: int, says: str
) -> None:
    fake_nvml.fail("nvmlInit", code)
    seen, notes = nvml.read()
    assert seen == []
    assert len(notes) == 1
    assert says in notes[0]
    assert nvml.absent == (code in (LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED))


def test_a_driver_without_a_gpu_until_one_comes(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    fake_nvml.gpus = 0
    for _ in range(5):
        seen, notes = nvml.read()
        assert seen == []
        assert "no GPU" in notes[0]
    assert fake_nvml.calls["nvmlInit"] == 1
    fake_nvml.gpus = 1
    clock.now += LONGEST_PAUSE
    assert len(nvml.read()[0]) == 1


def test_no_binding_at_all(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    seen, notes = Nvml(clock=clock).read()
    assert seen == []
    assert "pip install nvidia-ml-py" in notes[0]


def test_closing_gives_the_library_back_and_a_later_reading_starts_again(nvml: Nvml, fake_nvml: FakeNvml) -> None:
    nvml.close()
    assert fake_nvml.calls["nvmlShutdown"] == 0  # nothing was opened
    nvml.read()
    nvml.close()
    nvml.close()
    assert fake_nvml.calls["nvmlShutdown"] == 1
    assert gpus(nvml)[0].error is None


def test_every_start_of_the_library_has_one_end(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    nvml.read()
    for _ in range(5):
        fake_nvml.fail("nvmlDeviceGetUtilizationRates", GPU_IS_LOST, gpu=0)
        nvml.read()
        fake_nvml.mend()
        clock.now += LONGEST_PAUSE
        nvml.read()
    nvml.close()
    assert fake_nvml.calls["nvmlInit"] == fake_nvml.calls["nvmlShutdown"]


def test_names_that_are_no_text(fake_nvml: FakeNvml, clock: Clock) -> None:
    fake_nvml.name = b"\xff\x1b[2J<b>"
    assert gpus(Nvml(fake_nvml, clock=clock))[0].name == "�\x1b[2J<b>"  # data, escaped by whoever shows it
    fake_nvml.hook = lambda name: b"\xff".decode() if name == "nvmlDeviceGetName" else None  # as the binding does
    assert gpus(Nvml(fake_nvml, clock=clock))[0].name == "NVIDIA GPU"


def test_text_that_no_file_takes_is_replaced_and_cut() -> None:
    assert decoded("a\udcffb") == "a�b"
    assert len(decoded("x" * 10**6) or "") == LONGEST_COMMAND
    assert decoded(None) is None


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x0, ()),
        (0x1, ()),
        (0x4, ("power cap",)),
        (0x20, ("heat",)),
        (0x40 | 0x8, ("heat", "hardware slowdown")),
        (0x80, ("power brake",)),
        (0x1000_0001, ("unknown reason 0x10000000",)),
    ],
)
def test_throttling_in_words(bits: int, words: tuple[str, ...]) -> None:
    assert in_words(bits) == words


# Slow questions -------------------------------------------------------------------------------------------------------


def test_a_slow_driver_is_asked_in_turns_and_every_question_comes_round(fake_nvml: FakeNvml, clock: Clock) -> None:
    slow = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetFanSpeed")

    def take_time(question: str) -> None:
        clock.now += 0.003 if question in slow else 1e-6

    fake_nvml.gpus, fake_nvml.hook = 1, take_time
    nvml = Nvml(fake_nvml, clock=clock)
    nvml.read()
    taken = []
    for _ in range(60):
        clock.now += 0.1
        start = clock.now
        seen, _ = nvml.read()
        taken.append(clock.now - start)
        assert (seen[0].gpu.power, seen[0].gpu.energy, seen[0].gpu.fan) == (412.5, 5000.0, 30.0)
    assert max(taken) < LEAST + 0.0035
    for question in slow:
        assert 5 <= fake_nvml.calls[question] <= 8, question  # each in its share of 6 s


def test_a_slow_question_takes_no_more_than_its_share_however_often_one_looks(
    fake_nvml: FakeNvml, clock: Clock
) -> None:
    def slow(question: str) -> None:
        clock.now += 0.004 if question == "nvmlDeviceGetTotalEnergyConsumption" else 1e-5

    fake_nvml.gpus, fake_nvml.hook = 1, slow
    nvml = Nvml(fake_nvml, clock=clock)
    taken, energies = [], []
    for _ in range(600):  # a minute
        begin = clock.now
        energies.append(nvml.read()[0][0].gpu.energy)
        taken.append(clock.now - begin)
        clock.now = begin + 0.1
    assert 40 <= fake_nvml.calls["nvmlDeviceGetTotalEnergyConsumption"] <= 46  # 0.3% of the time
    assert fake_nvml.calls["nvmlDeviceGetPowerUsage"] == 600  # the quick ones do not wait for it
    assert sorted(taken)[300] < 0.001
    assert set(energies) == {5000.0}


def test_a_quick_driver_is_asked_everything_every_time(nvml: Nvml, fake_nvml: FakeNvml) -> None:
    for _ in range(10):
        nvml.read()
    assert fake_nvml.calls["nvmlDeviceGetPowerUsage"] == 20
    assert fake_nvml.calls["nvmlDeviceGetTotalEccErrors"] == 40


def test_the_first_reading_asks_everything_however_slow(fake_nvml: FakeNvml, clock: Clock) -> None:
    fake_nvml.hook = lambda question: setattr(clock, "now", clock.now + 0.05)
    gpu = gpus(Nvml(fake_nvml, clock=clock))[0]
    assert None not in (gpu.power, gpu.energy, gpu.fan, gpu.ecc_corrected, gpu.ecc_uncorrected)


@pytest.mark.parametrize("how", ["too narrow", "not known"])
def test_without_counters_of_pcie_the_slow_question_is_asked_beside(
    fake_nvml: FakeNvml, clock: Clock, how: str
) -> None:
    asked_in: set[threading.Thread] = set()
    answered = threading.Event()

    def note(question: str) -> None:
        if question == "nvmlDeviceGetPcieThroughput":
            asked_in.add(threading.current_thread())
            answered.set()

    fake_nvml.gpus, fake_nvml.hook = 1, note
    if how == "too narrow":
        fake_nvml.wide = False
    else:
        fake_nvml.fail("nvmlDeviceGetFieldValues", NOT_SUPPORTED)
    nvml = Nvml(fake_nvml, clock=clock)
    first = gpus(nvml)[0]
    assert (first.sent, first.received) == (None, None)
    assert answered.wait(60)
    until = time.monotonic() + 60
    while gpus(nvml)[0].sent is None and time.monotonic() < until:
        time.sleep(0.01)
    gpu = gpus(nvml)[0]
    assert (gpu.sent, gpu.received) == (100 * 1024, 200 * 1024)
    assert threading.current_thread() not in asked_in
    nvml.close()
    assert not any(thread.is_alive() for thread in asked_in)


def test_a_counter_that_begins_anew_gives_no_rate(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    fake_nvml.pcie = [10_000, 10_000]
    nvml.read()
    clock.now += 1
    fake_nvml.pcie = [5, 20_000]
    gpu = gpus(nvml)[0]
    assert gpu.sent is None
    assert gpu.received == 10_000


# The real binding -----------------------------------------------------------------------------------------------------


def test_the_codes_are_those_of_the_binding() -> None:
    kinds = {
        pynvml.NVMLError_NotSupported: Unsupported,
        pynvml.NVMLError_FunctionNotFound: Unsupported,
        pynvml.NVMLError_Uninitialized: Dead,
        pynvml.NVMLError_LibRmVersionMismatch: Dead,
        pynvml.NVMLError_LibraryNotFound: Dead,
        pynvml.NVMLError_DriverNotLoaded: Dead,
        pynvml.NVMLError_GpuIsLost: Lost,
        pynvml.NVMLError_ResetRequired: Lost,
        pynvml.NVMLError_Unknown: Passing,
        pynvml.NVMLError_Timeout: Passing,
    }
    for error, kind in kinds.items():
        assert type(judged(error())) is kind, error
    codes = {value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
    assert {*KINDS, *WORDS} <= codes


def test_the_binding_has_every_name_that_is_asked_for(nvml: Nvml, fake_nvml: FakeNvml) -> None:
    """The fake answers only names that the real binding has; here are those that only failures lead to."""
    module: ModuleType = pynvml
    nvml.read()
    for name in (*fake_nvml.calls, "nvmlDeviceGetPcieThroughput", "nvmlDeviceGetPowerManagementLimit"):
        assert callable(getattr(module, name)), name
    assert module.nvmlMemory_v2 == 0x02000028
    assert (module.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, module.NVML_FI_DEV_PCIE_COUNT_RX_BYTES) == (197, 198)
    assert (module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM, module.NVML_TEMPERATURE_GPU) == (1, 2, 0)


def test_the_real_binding_on_a_machine_without_the_library_says_so() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pass
    else:
        pynvml.nvmlShutdown()
        pytest.skip("this machine has NVML")
    nvml = Nvml()
    assert nvml.read()[0] == []
    assert nvml.absent
