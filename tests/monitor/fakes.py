"""A fake NVML: two GPUs behind the names, answers and errors of the module pynvml, which may fail in any way."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 2**30
NOT_SUPPORTED, UNINITIALIZED, GPU_IS_LOST, MISMATCH, UNKNOWN = 3, 1, 15, 18, 999


class FakeNvml:
    """Stands in for pynvml: `Sampler(binding=FakeNvml())`.

    `fail("nvmlDeviceGetFanSpeed", 3)` makes a call raise the error with that code, for one GPU (`gpu=1`) or all;
    `mend` ends that. `calls` counts what was asked. Attributes hold what the GPUs answer.
    """

    def __init__(self, gpus: int = 2) -> None:
        self.gpus = gpus
        self.calls: Counter[str] = Counter()
        self.failures: dict[tuple[str, int | None], int] = {}
        self.generation = 0  # handles of an earlier one are not valid any more
        self.running = False
        self.name: Any = "NVIDIA H200"
        self.reasons = 0x1
        self.power_limit = 700_000
        self.pcie = [0, 0]
        self.wide = True  # the counters of PCIe have 64 bits
        self.compute: list[tuple[int, int | None]] = []
        self.graphics: list[tuple[int, int | None]] = []
        self.hook: Callable[[str], None] | None = None  # called with every question

    def fail(self, question: str, code: int, gpu: int | None = None) -> None:
        self.failures[question, gpu] = code

    def mend(self) -> None:
        self.failures.clear()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml") or not hasattr(pynvml, name):
            raise AttributeError(name)

        def call(*about: Any) -> Any:
            return self._answer(name, about)

        return call

    def _answer(self, name: str, about: tuple[Any, ...]) -> Any:
        self.calls[name] += 1
        if self.hook is not None:
            self.hook(name)
        index = about[0][1] if about and isinstance(about[0], tuple) else None
        index = about[0] if name == "nvmlDeviceGetHandleByIndex" else index
        code = self.failures.get((name, index), self.failures.get((name, None)))
        if code is not None:
            raise pynvml.NVMLError(code)
        if name == "nvmlInit":
            self.generation += 1
            self.running = True
            return None
        stale = bool(about) and isinstance(about[0], tuple) and about[0][0] != self.generation
        if not self.running or stale:
            raise pynvml.NVMLError(UNINITIALIZED)
        if name == "nvmlShutdown":
            self.running = False
            return None
        return self.answers(about, index)[name]()  # a question that the fake does not know is a mistake in a test

    def answers(self, about: tuple[Any, ...], index: int | None) -> dict[str, Callable[[], Any]]:
        """What each question is answered."""
        answers: dict[str, Callable[[], Any]] = {
            "nvmlSystemGetDriverVersion": lambda: "580.95.05",
            "nvmlDeviceGetCount": lambda: self.gpus,
            "nvmlDeviceGetHandleByIndex": lambda: (self.generation, about[0]),
            "nvmlDeviceGetName": lambda: self.name,
            "nvmlDeviceGetUUID": lambda: f"GPU-{index}",
            "nvmlDeviceGetMemoryInfo": lambda: self._memory(*about[1:]),
            "nvmlDeviceGetUtilizationRates": lambda: SimpleNamespace(gpu=97, memory=40),
            "nvmlDeviceGetTemperatureV": lambda: 61,
            "nvmlDeviceGetTemperature": lambda: 61,
            "nvmlDeviceGetFanSpeed": lambda: 30,
            "nvmlDeviceGetPowerUsage": lambda: 412_500,
            "nvmlDeviceGetEnforcedPowerLimit": lambda: self.power_limit,
            "nvmlDeviceGetTotalEnergyConsumption": lambda: 5_000_000,
            "nvmlDeviceGetClockInfo": lambda: {1: 1410, 2: 3201}[about[1]],
            "nvmlDeviceGetMaxClockInfo": lambda: {1: 1980, 2: 3201}[about[1]],
            "nvmlDeviceGetCurrentClocksEventReasons": lambda: self.reasons,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda: self.reasons,
            "nvmlDeviceGetTotalEccErrors": lambda: {0: 7, 1: 0}[about[1]],
            "nvmlDeviceGetFieldValues": self._fields,
            "nvmlDeviceGetPcieThroughput": lambda: {0: 100, 1: 200}[about[1]],
        }
        for version in ("v2", "v3"):
            answers[f"nvmlDeviceGetComputeRunningProcesses_{version}"] = lambda: _rows(self.compute)
            answers[f"nvmlDeviceGetGraphicsRunningProcesses_{version}"] = lambda: _rows(self.graphics)
        return answers

    def _memory(self, version: int | None = None) -> Any:
        if version is None:
            return SimpleNamespace(total=144 * GIB, free=100 * GIB, used=44 * GIB)
        return SimpleNamespace(total=144 * GIB, free=100 * GIB, used=43 * GIB, reserved=GIB)

    def _fields(self) -> Any:
        kind = 3 if self.wide else 1
        return [
            SimpleNamespace(nvmlReturn=0, valueType=kind, value=SimpleNamespace(ullVal=count)) for count in self.pcie
        ]


def _rows(held: list[tuple[int, int | None]]) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=memory, gpuInstanceId=0xFFFFFFFF) for pid, memory in held]


class Clock:
    """Time that goes on when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
