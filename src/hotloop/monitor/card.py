"""One NVIDIA GPU: what it is asked once, what every time, and what in turns because the driver is slow at it."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from hotloop.monitor.failures import UNKNOWN, Lost, Passing, Unsupported
from hotloop.monitor.foreign import decoded
from hotloop.monitor.gpu_holders import merged
from hotloop.monitor.reading import Gpu, Process

SELDOM = 60.0  # seconds until a limit is read again, or a refused question is tried again: MIG may have been switched
LEAST, SHARE = 0.0015, 0.003  # the time for slow questions: seconds, and of the time since the last reading

SM, MEMORY = 1, 2  # NVML's numbers of clocks
VOLATILE, CORRECTED, UNCORRECTED = 0, 0, 1
GPU_SENSOR = 0
MEMORY_V2 = 0x02000028
TX, RX = 197, 198  # NVML's fields: bytes sent and received, since driver 555
WIDE = (2, 3, 4)  # types of value with 64 bits; a counter of 32 would overflow several times between two readings
KIB = 1024  # what NVML counts throughput in

# NVML's bits; 1, an idle GPU, is no throttling
REASONS = MappingProxyType(
    {
        "power cap": 0x4,
        "heat": 0x20 | 0x40,
        "hardware slowdown": 0x8,
        "power brake": 0x80,
        "sync boost": 0x10,
        "clock setting": 0x2,
        "display": 0x100,
        "board limit": 0x200,
        "reliability": 0x400,
    }
)
IDLE = 0x1


class NvmlDevice:
    """A GPU whose handle is kept. Only `Dead` leaves it; everything else becomes None, `complaints` or an error."""

    def __init__(self, ask: Callable[..., Any], index: int, before: Gpu | None, clock: Callable[[], float]) -> None:
        self._of_library, self._clock = ask, clock
        self._refused: dict[tuple[Any, ...], float] = {}  # question → when it may be tried again
        self._read_at: float | None = None
        self._limit: float | None = None
        self._limit_due = -float("inf")
        self._kept: dict[str, Any] = {}  # the answers to slow questions
        self._slow: dict[str, Callable[[], Any]] = {
            "power": lambda: _scaled(self._ask("nvmlDeviceGetPowerUsage"), 1e-3),
            "energy": lambda: _scaled(self._ask("nvmlDeviceGetTotalEnergyConsumption"), 1e-3),
            "traffic": Traffic(self._ask, clock).read,
            "fan": lambda: _scaled(self._ask("nvmlDeviceGetFanSpeed")),
            "ecc_corrected": lambda: self._ask("nvmlDeviceGetTotalEccErrors", CORRECTED, VOLATILE),
            "ecc_uncorrected": lambda: self._ask("nvmlDeviceGetTotalEccErrors", UNCORRECTED, VOLATILE),
        }
        self._turns = deque(self._slow)
        self._due: dict[str, float] = {}  # when a question that took long may be asked again
        self.complaints: list[str] = []
        self.lost: str | None = None  # why the GPU does not answer
        self.known = before or Gpu(index, "NVIDIA GPU")
        try:
            self._handle = ask("nvmlDeviceGetHandleByIndex", index)
            self.known = self._facts(index)
        except (Lost, Passing, Unsupported) as error:
            self.lost = str(error)

    def read(self) -> Gpu:
        """What the GPU tells now, its processes without their names. One that is lost is not asked again."""
        self.complaints.clear()
        if self.lost is None:
            try:
                return self._seen()
            except Lost as error:
                self.lost = str(error)
        return replace(self.known, error=self.lost)

    def _facts(self, index: int) -> Gpu:
        """What never changes, asked once."""
        memory = self._memory()
        return Gpu(
            index,
            decoded(self._ask("nvmlDeviceGetName")) or self.known.name,
            uuid=decoded(self._ask("nvmlDeviceGetUUID")),
            memory_total=None if memory is None else int(memory.total),
            clock_most=_scaled(self._ask("nvmlDeviceGetMaxClockInfo", SM)),
            memory_clock_most=_scaled(self._ask("nvmlDeviceGetMaxClockInfo", MEMORY)),
        )

    def _seen(self) -> Gpu:
        memory = self._memory()
        utilisation = self._ask("nvmlDeviceGetUtilizationRates")
        reasons = self._first(
            ("nvmlDeviceGetCurrentClocksEventReasons",), ("nvmlDeviceGetCurrentClocksThrottleReasons",)
        )
        self._take_turns()
        sent, received = self._kept.get("traffic") or (None, None)
        total = self.known.memory_total if memory is None else int(memory.total)
        return replace(
            self.known,
            utilisation=None if utilisation is None else float(utilisation.gpu),
            memory_used=None if memory is None else int(memory.used),
            memory_free=None if memory is None else int(memory.free),
            memory_total=total,
            temperature=_scaled(
                self._first(("nvmlDeviceGetTemperatureV", GPU_SENSOR), ("nvmlDeviceGetTemperature", GPU_SENSOR))
            ),
            power_limit=self._power_limit(),
            clock=_scaled(self._ask("nvmlDeviceGetClockInfo", SM)),
            memory_clock=_scaled(self._ask("nvmlDeviceGetClockInfo", MEMORY)),
            throttled=None if reasons is None else in_words(reasons),
            sent=sent,
            received=received,
            processes=self._holders(total),
            **{name: answer for name, answer in self._kept.items() if name != "traffic"},
        )

    def _memory(self) -> Any:
        """Free and used bytes by the second version of the question, where the driver knows it.

        Its `used` leaves out what the driver keeps for itself, as `nvidia-smi` has done since driver 510; the first
        version counts that as used. A GPU that fails at this most basic question has failed as a whole.
        """
        return self._first(("nvmlDeviceGetMemoryInfo", MEMORY_V2), ("nvmlDeviceGetMemoryInfo",), fatal=UNKNOWN)

    def _holders(self, total: int | None) -> tuple[Process, ...] | None:
        lists = {
            kind: self._first(*((f"nvmlDeviceGet{kind.title()}RunningProcesses_{v}",) for v in ("v3", "v2")))
            for kind in ("compute", "graphics")
        }
        return merged(lists, total)

    def _power_limit(self) -> float | None:
        if self._clock() >= self._limit_due:
            asked = self._first(("nvmlDeviceGetEnforcedPowerLimit",), ("nvmlDeviceGetPowerManagementLimit",))
            self._limit = _scaled(asked, 1e-3)
            if asked is not None:
                self._limit_due = self._clock() + SELDOM
        return self._limit

    def _take_turns(self) -> None:
        """Ask what may take milliseconds, as much as there is time for; the rest keeps its last answer until its turn.

        Power and energy can take 3 ms each where the driver's own processor is asked, traffic 40 without counters. They
        are then asked so seldom that they take no more than their share of the time. Others answer at once, every time.
        The first reading asks all.
        """
        now = self._clock()
        since = float("inf") if self._read_at is None else now - self._read_at
        self._read_at = now
        for _ in range(len(self._turns)):
            name = self._turns[0]
            self._turns.rotate(-1)
            begin = self._clock()
            if begin < self._due.get(name, begin):
                continue
            self._kept[name] = None  # should the question fail
            self._kept[name] = self._slow[name]()
            taken = self._clock() - begin
            self._due[name] = begin + taken / SHARE if taken >= LEAST else begin
            if self._clock() - now >= max(LEAST, SHARE * since):
                break

    def _first(self, *variants: tuple[Any, ...], fatal: int | None = None) -> Any:
        """The answer to the first variant of a question that this driver knows."""
        for variant in variants:
            answer = self._ask(*variant, fatal=fatal)
            if answer is not None or variant not in self._refused:
                return answer
        return None

    def _ask(self, question: str, *about: Any, fatal: int | None = None) -> Any:
        """The answer, or None. Each call may fail on its own: on MIG, vGPU, WSL, Jetson or an old driver."""
        key = (question, *about)
        if self._clock() < self._refused.get(key, -float("inf")):
            return None
        try:
            answer = self._of_library(question, self._handle, *about)
        except Unsupported:
            self._refused[key] = self._clock() + SELDOM
            return None
        except Passing as error:
            if fatal is not None and error.code == fatal:
                raise Lost(error.error) from error
            self.complaints.append(f"GPU {self.known.index} did not answer {question}: {error}")
            return None
        self._refused.pop(key, None)
        return answer


class Traffic:
    """Bytes a second over PCIe from and to one GPU. By counters it needs two looks, so that the first is unknown."""

    def __init__(self, ask: Callable[..., Any], clock: Callable[[], float]) -> None:
        self._ask, self._clock = ask, clock
        self._last: tuple[float, tuple[int, int]] | None = None

    def read(self) -> tuple[float | None, float | None]:
        fields = self._ask("nvmlDeviceGetFieldValues", (TX, RX))
        if fields is None or any(field.nvmlReturn != 0 or field.valueType not in WIDE for field in fields):
            return self._measured(0), self._measured(1)
        now, counts = self._clock(), (int(fields[0].value.ullVal), int(fields[1].value.ullVal))
        last, self._last = self._last, (now, counts)
        if last is None or now <= last[0]:
            return None, None
        sent, received = ((new - old) / (now - last[0]) for new, old in zip(counts, last[1], strict=True))
        return (sent if sent >= 0 else None, received if received >= 0 else None)  # a counter may begin anew

    def _measured(self, direction: int) -> float | None:
        """The driver watches the bus for 20 ms before it answers."""
        told = self._ask("nvmlDeviceGetPcieThroughput", direction)
        return None if told is None else float(told) * KIB


def in_words(reasons: int) -> tuple[str, ...]:
    """Why the clocks are lower than they could be.

    >>> in_words(0x1), in_words(0x4 | 0x40), in_words(0x4000)
    ((), ('power cap', 'heat'), ('unknown reason 0x4000',))
    """
    words = [word for word, bits in REASONS.items() if reasons & bits]
    rest = reasons & ~IDLE
    for bits in REASONS.values():
        rest &= ~bits
    return (*words, *([f"unknown reason {rest:#x}"] if rest else []))


def _scaled(answer: Any, factor: float = 1.0) -> float | None:
    return None if answer is None else float(answer) * factor
