"""What NVIDIA's management library tells of driver and GPUs, without starting CUDA on any of them."""

from dataclasses import dataclass

from hotloop.device.facts import InstalledGpu
from hotloop.monitor.host import decoded
from hotloop.monitor.nvml_gpus import LIB_RM_VERSION_MISMATCH, Failed, Library


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
        library = Library()
    except Failed as error:
        return NvmlReading(mismatch=error.code == LIB_RM_VERSION_MISMATCH)
    ask = library.or_none
    cards: list[InstalledGpu] = []
    free: list[tuple[str, int]] = []
    count = ask("nvmlDeviceGetCount")
    for index in range(count or 0):
        handle = ask("nvmlDeviceGetHandleByIndex", index)
        if handle is None:  # a GPU that fell off the bus, or one that is not ours
            continue
        uuid = decoded(ask("nvmlDeviceGetUUID", handle))
        cards.append(InstalledGpu(decoded(ask("nvmlDeviceGetName", handle)) or "NVIDIA GPU", uuid))
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        if uuid is not None and memory is not None:
            free.append((uuid, int(memory.free)))
    version = ask("nvmlSystemGetCudaDriverVersion_v2")
    driver = decoded(ask("nvmlSystemGetDriverVersion"))
    ask("nvmlShutdown")
    return NvmlReading(
        driver=driver,
        driver_cuda=None if version is None else (version // 1000, version % 1000 // 10),
        cards=None if count is None else tuple(cards),
        free=tuple(free),
    )
