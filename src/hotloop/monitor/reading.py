"""`Reading`: one sample of the hardware. What is not known is None, never 0."""

from collections.abc import Collection
from dataclasses import dataclass, fields

from hotloop.records import Record


@dataclass(frozen=True)
class Process(Record):
    """A process that holds memory of a GPU, as the driver tells of it."""

    pid: int
    memory: int | None  # bytes of the GPU
    kind: str  # compute, graphics, or both
    name: str | None = None  # of the program; None where the process cannot be seen from here
    command: str | None = None  # the whole command line
    user: str | None = None
    ours: bool = False  # this process, or one that it has started
    cpu: float | None = None  # percent of a core
    started: float | None = None  # seconds since 1970


@dataclass(frozen=True)
class Gpu(Record):
    """A GPU at one moment. Percentages run from 0 to 100."""

    index: int
    name: str
    uuid: str | None = None
    utilisation: float | None = None  # percent of the time in which some kernel ran
    memory_used: int | None = None  # bytes
    memory_free: int | None = None
    memory_total: int | None = None
    temperature: float | None = None  # degrees Celsius
    fan: float | None = None  # percent
    power: float | None = None  # watts
    power_limit: float | None = None
    energy: float | None = None  # joules since the driver was loaded
    clock: float | None = None  # of the multiprocessors, MHz
    clock_most: float | None = None
    memory_clock: float | None = None
    memory_clock_most: float | None = None
    throttled: tuple[str, ...] | None = None  # reasons in words: power cap, heat; empty where it is not
    sent: float | None = None  # over PCIe from the GPU, bytes a second
    received: float | None = None  # over PCIe to the GPU
    ecc_corrected: int | None = None  # errors of the memory since the driver was loaded
    ecc_uncorrected: int | None = None
    processes: tuple[Process, ...] | None = None  # those with most memory first
    error: str | None = None  # why nothing else is known, as of a GPU that fell off the bus


@dataclass(frozen=True)
class Host(Record):
    """The computer around the GPUs."""

    name: str | None = None
    cpu: float | None = None  # percent of all cores
    cores: int | None = None
    memory_used: int | None = None  # bytes
    memory_total: int | None = None
    swap_used: int | None = None
    disk_read: float | None = None  # bytes a second
    disk_written: float | None = None
    net_received: float | None = None
    net_sent: float | None = None


@dataclass(frozen=True)
class Reading(Record):
    """One sample of everything."""

    time: float  # seconds since 1970
    host: Host
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None  # version of NVIDIA's driver
    notes: tuple[str, ...] = ()  # what could not be read, and why, in sentences


_NUMBERS = (float | None, int | None)
GPU_FIELDS = tuple(field.name for field in fields(Gpu) if field.type in _NUMBERS)
HOST_FIELDS = tuple(field.name for field in fields(Host) if field.type in _NUMBERS)


def is_among(gpu: Gpu, wanted: Collection[int | str] | None) -> bool:
    """Whether a GPU is wanted: by its index, or by its UUID, which torch gives without the prefix."""
    if wanted is None:
        return True
    uuid = (gpu.uuid or "").removeprefix("GPU-")
    return any(gpu.index == one if isinstance(one, int) else uuid == one.removeprefix("GPU-") for one in wanted)


def scalars(reading: Reading, gpus: Collection[int | str] | None = None) -> dict[str, float]:
    """The numbers of a reading by names that stay, of all GPUs or of some; what is not known is left out.

    >>> scalars(Reading(0.0, Host(cpu=12.5), (Gpu(0, "H200", utilisation=97.0, throttled=("heat",)),)))
    {'host/cpu': 12.5, 'gpu0/utilisation': 97.0, 'gpu0/throttled': 1.0}
    """
    numbers = {f"host/{name}": getattr(reading.host, name) for name in HOST_FIELDS}
    for gpu in reading.gpus:
        if is_among(gpu, gpus):
            numbers.update({f"gpu{gpu.index}/{name}": getattr(gpu, name) for name in GPU_FIELDS})
            numbers[f"gpu{gpu.index}/throttled"] = None if gpu.throttled is None else float(bool(gpu.throttled))
    return {name: value for name, value in numbers.items() if value is not None}
