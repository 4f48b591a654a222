"""What NVIDIA's management library tells of driver and GPUs, without starting CUDA on any of them."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hotloop.device.facts import InstalledGpu


@dataclass(frozen=True)
class NvmlReading:
    """One reading of NVML; empty where the library is absent or refuses."""

    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    cards: tuple[InstalledGpu, ...] | None = None
    free: tuple[tuple[str, int], ...] = ()  # (uuid, bytes)
    mismatch: bool = False

    def free_of(self, uuid: str | None) -> int | None:
        """Free bytes of the GPU with this UUID, which torch writes without NVML's "GPU-"."""
        return dict(self.free).get(f"GPU-{uuid}")


def read() -> NvmlReading:
    """Ask NVML once, and close it again."""
    try:
        import pynvml  # noqa: PLC0415  # a broken installation must not break `import hotloop.device`
    except ImportError:
        return NvmlReading()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NvmlReading(mismatch=isinstance(error, pynvml.NVMLError_LibRmVersionMismatch))
    try:
        return _read(pynvml)
    finally:
        _ask(pynvml, "nvmlShutdown")


def _read(pynvml: ModuleType) -> NvmlReading:
    cards: list[InstalledGpu] = []
    free: list[tuple[str, int]] = []
    count = _ask(pynvml, "nvmlDeviceGetCount")
    for index in range(count or 0):
        handle = _ask(pynvml, "nvmlDeviceGetHandleByIndex", index)
        if handle is None:  # a GPU that fell off the bus, or one that is not ours
            continue
        uuid = _text(_ask(pynvml, "nvmlDeviceGetUUID", handle))
        cards.append(InstalledGpu(_text(_ask(pynvml, "nvmlDeviceGetName", handle)) or "NVIDIA GPU", uuid))
        memory = _ask(pynvml, "nvmlDeviceGetMemoryInfo", handle)
        if uuid is not None and memory is not None:
            free.append((uuid, int(memory.free)))
    version = _ask(pynvml, "nvmlSystemGetCudaDriverVersion_v2")
    return NvmlReading(
        driver=_text(_ask(pynvml, "nvmlSystemGetDriverVersion")),
        driver_cuda=None if version is None else (version // 1000, version % 1000 // 10),
        cards=None if count is None else tuple(cards),
        free=tuple(free),
    )


def _ask(pynvml: ModuleType, question: str, *about: Any) -> Any:
    """The answer, or None: each NVML call may fail on its own, on MIG, vGPU, WSL or an old driver."""
    try:
        return getattr(pynvml, question)(*about)
    except (pynvml.NVMLError, AttributeError, UnicodeDecodeError):
        return None


def _text(answer: Any) -> str | None:
    """Old bindings answer in bytes."""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
