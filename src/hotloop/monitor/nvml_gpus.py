"""The one door to NVML, NVIDIA's management library: what each GPU tells, and what follows where it does not."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from hotloop.monitor.host import decoded
from hotloop.monitor.reading import Gpu, Process

PAUSE = 10.0  # seconds between attempts at a driver or a GPU that fails
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

# NVML's return codes, which are the same in every version; the classes of older bindings are fewer
UNINITIALIZED, NO_PERMISSION, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, GPU_IS_LOST = 1, 4, 9, 12, 15
RESET_REQUIRED, LIB_RM_VERSION_MISMATCH, UNKNOWN = 16, 18, 999
INVALID_ARGUMENT, NOT_SUPPORTED, FUNCTION_NOT_FOUND, VGPU_ECC_NOT_SUPPORTED = 2, 3, 13, 22
FREQUENCY_NOT_SUPPORTED, ARGUMENT_VERSION_MISMATCH, DEPRECATED = 24, 25, 26
INSUFFICIENT_POWER, IRQ_ISSUE, GPU_NOT_FOUND = 8, 11, 28

FAILURE_WORDS = MappingProxyType(
    {
        INSUFFICIENT_POWER: "its power cables are not attached (fix: switch off and attach them)",
        GPU_IS_LOST: "it fell off the bus (fix: restart the machine; if it happens again, look at power and cooling)",
        RESET_REQUIRED: "it must be reset (fix: end what uses it, then run `sudo nvidia-smi --gpu-reset`)",
        UNINITIALIZED: "NVML was closed by another part of this program",
        NO_PERMISSION: "this user may not ask NVIDIA's driver (fix: see who may with `ls -l /dev/nvidia*`)",
        DRIVER_NOT_LOADED: "NVIDIA's driver is installed, but not loaded (fix: `hotloop device` says what is missing)",
        LIBRARY_NOT_FOUND: "there is no NVIDIA driver here (fix: with an NVIDIA GPU, `hotloop device` says what to do)",
        LIB_RM_VERSION_MISMATCH: "the NVIDIA driver was updated, and the old one is still running"
        " (fix: restart the machine; in a container, restart the container too)",
    }
)


NOBODY = (0, 0xFFFFFFFF)  # PIDs that some drivers put where they have none to tell


class Failed(Exception):
    """An answer that did not come; one of the four below says what follows from it. Its text is for people."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.code: int | None = getattr(error, "value", None)
        super().__init__(FAILURE_WORDS.get(self.code or 0) or str(error).strip() or type(error).__name__)


class Unsupported(Failed):
    """This driver or GPU does not know the question, and will not know it a moment later."""


class Passing(Failed):
    """No answer this time; the next may come."""


class Lost(Failed):
    """The whole GPU does not answer any more."""


class Dead(Failed):
    """The library itself has gone: it must be started again."""


KINDS: MappingProxyType[int, type[Failed]] = MappingProxyType(
    {
        **dict.fromkeys((UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH), Dead),
        **dict.fromkeys((GPU_IS_LOST, RESET_REQUIRED, INSUFFICIENT_POWER, IRQ_ISSUE, GPU_NOT_FOUND), Lost),
        **dict.fromkeys((NOT_SUPPORTED, INVALID_ARGUMENT, NO_PERMISSION, FUNCTION_NOT_FOUND), Unsupported),
        **dict.fromkeys((VGPU_ECC_NOT_SUPPORTED, FREQUENCY_NOT_SUPPORTED), Unsupported),
        **dict.fromkeys((ARGUMENT_VERSION_MISMATCH, DEPRECATED), Unsupported),
    }
)


def judged(error: Exception) -> Failed:
    """The failure that an exception of the binding amounts to.

    >>> type(judged(AttributeError("an old binding lacks it"))).__name__
    'Unsupported'
    """
    if isinstance(error, AttributeError | TypeError | UnicodeDecodeError):
        return Unsupported(error)
    return KINDS.get(getattr(error, "value", 0), Passing)(error)


class Library:
    """The binding, started, of which every call either answers or raises one kind of `Failed`."""

    def __init__(self, binding: Any = None) -> None:
        if binding is None:
            import pynvml  # noqa: PLC0415  # it takes a while, and only who reads NVML needs it

            binding = pynvml
        self.binding = binding
        self.ask("nvmlInit")

    def ask(self, question: str, *about: Any) -> Any:
        try:
            return getattr(self.binding, question)(*about)
        except Exception as error:  # a broken driver may raise anything; it is judged, not hidden
            raise judged(error) from error

    def or_none(self, question: str, *about: Any) -> Any:
        """The answer, or None: each call may fail on its own, on MIG, vGPU, WSL or an old driver."""
        try:
            return self.ask(question, *about)
        except Failed:
            return None


class Nvml:
    """All GPUs of this machine in NVML's order, which is that of `nvidia-smi`.

    CUDA_VISIBLE_DEVICES is not heeded: a monitor shows what others do as well. So `index` is not always the number
    that torch gives to a GPU; the UUID is the same for both.
    """

    def __init__(self, binding: Any = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._given, self._clock = binding, clock
        self._library: Library | None = None
        self._gpus: list[NvmlDevice] = []
        self._known: dict[str, Gpu] = {}  # all that were ever here, by UUID or else by index
        self._why: str | None = None  # it is down
        self._due = -float("inf")  # when it may be started again
        self.driver: str | None = None

    def read(self) -> tuple[list[Gpu], list[str]]:
        """What each GPU tells, and what there is to say about those that do not. Never raises."""
        gone = self._gone()
        is_troubled = not self._gpus or bool(gone) or any(gpu.lost for gpu in self._gpus)
        if is_troubled and self._clock() >= self._due:  # only a library that starts anew would see one that came back
            self._restart()
            gone = self._gone()
        if self._library is not None:
            try:
                seen = [gpu.read() for gpu in self._gpus]
            except Dead as error:
                self._die(f"NVML stopped answering: {error}")
        if self._library is None:
            return self._down()
        notes = [note for gpu in self._gpus for note in gpu.complaints]
        notes += [f"GPU {gpu.index} ({gpu.name}, {gpu.uuid}) is not there any more" for gpu in gone]
        return seen, notes if self._gpus else [*notes, "NVIDIA's driver answers, but it shows no GPU here"]

    def close(self) -> None:
        """Give everything back; a later `read` starts again."""
        if self._library is not None:
            self._library.or_none("nvmlShutdown")  # what is dead need not be closed
        self._gpus, self._library, self._due = [], None, -float("inf")

    def _restart(self) -> None:
        """Start the library, anew where it ran already, and fetch all handles."""
        self.close()
        self._due = self._clock() + PAUSE
        try:
            self._library = library = Library(self._given)
            self.driver = decoded(library.or_none("nvmlSystemGetDriverVersion"))
            for index in range(library.ask("nvmlDeviceGetCount")):
                before = next((gpu for gpu in self._known.values() if gpu.index == index), None)
                self._gpus.append(NvmlDevice(library.ask, index, before, self._clock))
        except Failed as error:
            self._die(str(error))
        for known in (gpu.known for gpu in self._gpus):
            self._known.pop(str(known.index), None)
            self._known[known.uuid or str(known.index)] = known

    def _gone(self) -> list[Gpu]:
        """The GPUs that were taken out: by UUID, since the others move up. Nobody where not every UUID is known."""
        here = {gpu.known.uuid for gpu in self._gpus}
        if None in here or self._library is None:
            return []
        return [gpu for gpu in self._known.values() if gpu.uuid is not None and gpu.uuid not in here]

    def _die(self, why: str) -> None:
        self.close()
        self._why, self._due = why, self._clock() + PAUSE

    def _down(self) -> tuple[list[Gpu], list[str]]:
        """GPUs that were there stay in sight, with an error instead of numbers."""
        if not self._known:
            return [], [f"no NVIDIA GPU can be read: {self._why}"]
        error = f"NVML does not answer: {self._why}"
        note = f"no NVIDIA GPU can be read at present: {self._why}; it is tried again every {PAUSE:.0f} s"
        return [replace(gpu, error=error) for gpu in self._known.values()], [note]


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


def merged(lists: Mapping[str, Iterable[Any] | None], total: int | None) -> tuple[Process, ...] | None:
    """One nameless process for each row of the lists by kind, with most memory first; None where none is known.

    The same process may be in both lists, with the same memory, and more than once in one of them, with a part of
    it for each slice of a GPU that is cut in slices (MIG).
    """
    if all(rows is None for rows in lists.values()):
        return None
    held: dict[int, dict[str, list[int | None]]] = {}
    for kind, rows in lists.items():
        for row in rows or ():
            if row.pid not in NOBODY:
                held.setdefault(int(row.pid), {}).setdefault(kind, []).append(_memory(row, total))
    holders = (
        Process(pid, _all(kinds), "both" if len(kinds) > 1 else next(iter(kinds))) for pid, kinds in held.items()
    )
    return tuple(sorted(holders, key=lambda holder: (-(holder.memory or 0), holder.pid)))


def _memory(row: Any, total: int | None) -> int | None:
    """None on WSL and often on MIG. A process that holds a GPU holds some of it, so that 0 means nothing was told."""
    used = row.usedGpuMemory
    return None if not used or (total is not None and used > total) else int(used)


def _all(kinds: Mapping[str, list[int | None]]) -> int | None:
    sums = [sum(known) for parts in kinds.values() if len(known := [p for p in parts if p is not None]) == len(parts)]
    return max(sums, default=None)
