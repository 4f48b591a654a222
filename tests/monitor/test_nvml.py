"""The gate to NVML: what it tells, what it keeps, and how it fails."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pynvml
import pytest

from hotloop.monitor.host import LONGEST_COMMAND, decoded
from hotloop.monitor.nvml_gpus import (
    FAILURE_WORDS,
    KINDS,
    LEAST,
    PAUSE,
    SELDOM,
    Dead,
    Lost,
    Nvml,
    Passing,
    Unsupported,
    in_words,
    judged,
)
from hotloop.monitor.reading import Gpu

from .fakes import GIB, GPU_IS_LOST, MISMATCH, NOT_SUPPORTED, UNINITIALIZED, UNKNOWN, Clock, FakeNvml

NO_PERMISSION, TIMEOUT, LIBRARY_NOT_FOUND = 4, 10, 12


@pytest.fixture
def nvml(fake_nvml: FakeNvml, clock: Clock) -> Iterator[Nvml]:
    opened = Nvml(fake_nvml, clock=clock)
    yield opened
    opened.close()


def gpus(nvml: Nvml) -> list[Gpu]:
    return nvml.read()[0]


def test_everything_that_the_driver_tells(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    nvml.read()
    clock.now += 2
    fake_nvml.pcie = [4000, 9000]
    seen, notes = nvml.read()
    assert notes == []
    assert nvml.driver == "580.95.05"
    assert [each.index for each in seen] == [0, 1]
    assert seen[0] == Gpu(
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
        processes=(),
    )


def test_facts_are_fetched_once_and_a_power_limit_again_in_a_while_or_at_once_where_it_was_not_told(
    nvml: Nvml, fake_nvml: FakeNvml, clock: Clock
) -> None:
    fake_nvml.fail("nvmlDeviceGetEnforcedPowerLimit", TIMEOUT)
    assert gpus(nvml)[0].power_limit is None
    fake_nvml.mend()
    for _ in range(19):
        clock.now += 0.5
        assert gpus(nvml)[0].power_limit == 700
    fetched = {"nvmlInit": 1, "nvmlDeviceGetCount": 1, "nvmlSystemGetDriverVersion": 1, "nvmlDeviceGetMaxClockInfo": 4}
    fetched |= dict.fromkeys(("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlDeviceGetUUID"), 2)
    fetched |= dict.fromkeys(("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"), 40)  # a quick driver
    fetched["nvmlDeviceGetEnforcedPowerLimit"] = 4
    assert {question: fake_nvml.calls[question] for question in fetched} == fetched
    fake_nvml.power_limit = 350_000
    clock.now += SELDOM
    assert gpus(nvml)[0].power_limit == 350


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
    assert (gpu.error, gpu.memory_used, gpu.temperature) == (None, 43 * GIB, 61)


def test_what_is_not_supported_is_seldom_asked_again_and_what_fails_in_passing_is_said_and_asked_at_once(
    nvml: Nvml, fake_nvml: FakeNvml, clock: Clock
) -> None:
    fake_nvml.fail("nvmlDeviceGetFanSpeed", NOT_SUPPORTED, gpu=0)
    fake_nvml.fail("nvmlDeviceGetFanSpeed", UNKNOWN, gpu=1)
    for _ in range(10):
        (note,) = nvml.read()[1]
    assert "GPU 1" in note
    assert "nvmlDeviceGetFanSpeed" in note
    assert fake_nvml.calls["nvmlDeviceGetFanSpeed"] == 1 + 10
    fake_nvml.mend()
    assert [gpu.fan for gpu in gpus(nvml)] == [None, 30]
    clock.now += SELDOM
    assert [gpu.fan for gpu in gpus(nvml)] == [30, 30]


@pytest.mark.parametrize(
    ("new", "old", "field"),
    [
        ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature", "temperature"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons", "throttled"),
    ],
)
def test_an_old_driver_is_asked_in_the_old_way(nvml: Nvml, fake_nvml: FakeNvml, new: str, old: str, field: str) -> None:
    whole = fake_nvml._memory

    def old_memory(version: int | None = None) -> Any:
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return whole()

    fake_nvml._memory = old_memory  # type: ignore[method-assign]
    fake_nvml.fail(new, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    nvml.read()
    gpu = gpus(nvml)[0]
    assert getattr(gpu, field) is not None
    assert (gpu.memory_used, gpu.error) == (44 * GIB, None), "with what the driver keeps for itself"
    assert fake_nvml.calls[new] == 2
    assert fake_nvml.calls[old] == 4


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
    (lost, other), notes = nvml.read()
    assert lost.error
    assert (lost.name, lost.uuid, lost.utilisation, lost.processes) == ("NVIDIA H200", "GPU-0", None, None)
    assert (other.error, other.utilisation, notes) == (None, 97, [])


def test_a_gpu_that_comes_back_is_seen_after_a_pause(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    fake_nvml.fail("nvmlDeviceGetHandleByIndex", GPU_IS_LOST, gpu=0)
    for _ in range(3):
        first, second = gpus(nvml)
        assert "fell off the bus" in str(first.error)
        assert second.error is None
        fake_nvml.mend()
        assert gpus(nvml)[0].error  # it is left alone for a while
        clock.now += PAUSE
        assert gpus(nvml)[0].error is None
        fake_nvml.fail("nvmlDeviceGetUtilizationRates", GPU_IS_LOST, gpu=0)
    nvml.close()
    nvml.close()
    assert fake_nvml.calls["nvmlInit"] == fake_nvml.calls["nvmlShutdown"] == 4
    fake_nvml.mend()
    assert gpus(nvml)[0].error is None, "a later reading starts again"


def test_a_gpu_that_is_taken_out_is_told_of_until_it_is_put_back(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    nvml.read()
    fake_nvml.fail("nvmlDeviceGetUtilizationRates", GPU_IS_LOST, gpu=1)
    nvml.read()
    fake_nvml.mend()
    fake_nvml.gpus = 1
    for _ in range(3):
        clock.now += PAUSE
        seen, (note,) = nvml.read()
        assert [each.error for each in seen] == [None]
        assert "GPU 1" in note
        assert "not there any more" in note
    fake_nvml.gpus = 2
    clock.now += PAUSE
    seen, notes = nvml.read()
    assert ([each.error for each in seen], notes) == ([None, None], [])


@pytest.mark.parametrize("code", [UNINITIALIZED, MISMATCH, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_nvml_that_dies_in_the_middle_is_said_and_started_again(
    nvml: Nvml, fake_nvml: FakeNvml, clock: Clock, code: int
) -> None:
    nvml.read()
    fake_nvml.fail("nvmlDeviceGetPowerUsage", code)
    fake_nvml.fail("nvmlInit", code)
    for _ in range(3):
        seen, notes = nvml.read()
        assert [(each.name, bool(each.error)) for each in seen] == [("NVIDIA H200", True)] * 2
        assert len(notes) == 1
    fake_nvml.mend()
    clock.now += PAUSE
    seen, notes = nvml.read()
    assert ([(each.error, each.power) for each in seen], notes) == ([(None, 412.5)] * 2, [])


def test_there_is_a_pause_between_attempts(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    fake_nvml.fail("nvmlInit", MISMATCH)
    for _ in range(300):  # a minute
        nvml.read()
        clock.now += 0.2
    assert 5 <= fake_nvml.calls["nvmlInit"] <= 1 + 60 / PAUSE


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
    seen, (note,) = nvml.read()
    assert seen == []
    assert says in note


def test_a_driver_without_a_gpu_until_one_comes(fake_nvml: FakeNvml, clock: Clock) -> None:
    nvml = Nvml(fake_nvml, clock=clock)
    fake_nvml.gpus = 0
    for _ in range(5):
        seen, (note,) = nvml.read()
        assert seen == []
        assert "no GPU" in note
    assert fake_nvml.calls["nvmlInit"] == 1
    fake_nvml.gpus = 1
    clock.now += PAUSE
    assert len(nvml.read()[0]) == 1


def test_names_that_are_no_text(fake_nvml: FakeNvml, clock: Clock) -> None:
    fake_nvml.name = b"\xff\x1b[2J<b>"
    assert gpus(Nvml(fake_nvml, clock=clock))[0].name == "�\x1b[2J<b>"  # data, escaped by whoever shows it
    fake_nvml.hook = lambda name: b"\xff".decode() if name == "nvmlDeviceGetName" else None  # as the binding does
    assert gpus(Nvml(fake_nvml, clock=clock))[0].name == "NVIDIA GPU"
    assert decoded("a\udcffb") == "a�b", "what no file takes is replaced"
    assert len(decoded("x" * 10**6) or "") == LONGEST_COMMAND


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
        assert (seen[0].power, seen[0].energy, seen[0].fan) == (412.5, 5000.0, 30.0)
    assert max(taken) < LEAST + 0.0035
    for question in slow:
        assert 5 <= fake_nvml.calls[question] <= 8, question  # each in its share of 6 s


@pytest.mark.parametrize("how", ["too narrow", "not known"])
def test_without_counters_of_pcie_the_slow_question_is_asked_in_its_turn(
    fake_nvml: FakeNvml, clock: Clock, how: str
) -> None:
    def slow(question: str) -> None:
        clock.now += 0.02 if question == "nvmlDeviceGetPcieThroughput" else 1e-5

    fake_nvml.gpus, fake_nvml.hook, fake_nvml.wide = 1, slow, how != "too narrow"
    if how == "not known":
        fake_nvml.fail("nvmlDeviceGetFieldValues", NOT_SUPPORTED)
    nvml = Nvml(fake_nvml, clock=clock)
    for _ in range(60):
        gpu = gpus(nvml)[0]
        assert (gpu.sent, gpu.received) == (100 * 1024, 200 * 1024)
        assert None not in (gpu.power, gpu.energy, gpu.fan, gpu.ecc_corrected), "the first reading asks everything"
        clock.now += 0.5
    assert 2 * 2 <= fake_nvml.calls["nvmlDeviceGetPcieThroughput"] <= 2 * 4, "half a minute has two turns or three"


def test_a_counter_that_begins_anew_gives_no_rate(nvml: Nvml, fake_nvml: FakeNvml, clock: Clock) -> None:
    fake_nvml.pcie = [10_000, 10_000]
    nvml.read()
    clock.now += 1
    fake_nvml.pcie = [5, 20_000]
    gpu = gpus(nvml)[0]
    assert (gpu.sent, gpu.received) == (None, 10_000)


def test_codes_and_names_are_those_of_the_binding(nvml: Nvml, fake_nvml: FakeNvml) -> None:
    kinds = {
        Unsupported: ("NotSupported", "FunctionNotFound"),
        Dead: ("Uninitialized", "LibRmVersionMismatch", "LibraryNotFound", "DriverNotLoaded"),
        Lost: ("GpuIsLost", "ResetRequired"),
        Passing: ("Unknown", "Timeout"),
    }
    told = {kind: tuple(type(judged(getattr(pynvml, f"NVMLError_{name}")())) for name in kinds[kind]) for kind in kinds}
    assert told == {kind: (kind,) * len(names) for kind, names in kinds.items()}
    codes = {value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
    assert {*KINDS, *FAILURE_WORDS} <= codes
    nvml.read()  # the fake answers only names that the real binding has; and those that only failures lead to:
    for name in (*fake_nvml.calls, "nvmlDeviceGetPcieThroughput", "nvmlDeviceGetPowerManagementLimit"):
        assert callable(getattr(pynvml, name)), name
    module: ModuleType = pynvml
    assert module.nvmlMemory_v2 == 0x02000028
    assert (module.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, module.NVML_FI_DEV_PCIE_COUNT_RX_BYTES) == (197, 198)
    assert (module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM, module.NVML_TEMPERATURE_GPU) == (1, 2, 0)
