"""`Sampler`: one look at everything, as often as somebody wants one."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from hotloop.monitor.host import Around
from hotloop.monitor.nvml_gpus import Nvml
from hotloop.monitor.processes import People
from hotloop.monitor.reading import Gpu, Reading


class Sampler:
    """Reads the GPUs, who uses them, and the host. It never raises: what cannot be read is None, or said in `notes`.

    GPUs are numbered as `nvidia-smi` numbers them, whatever CUDA_VISIBLE_DEVICES says. Nothing is opened before the
    first reading; `close` gives it back. Rates (disk, network, PCIe, CPU) are None in the first reading.

    >>> with Sampler() as sampler:
    ...     reading = sampler.read()
    >>> reading.host.memory_total > 0
    True

    `binding` stands in for the module pynvml, as in tests.
    """

    def __init__(
        self,
        *,
        binding: Any = None,
        people: People | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml = Nvml(binding, clock=clock)
        self._people = people or People()
        self._around = Around(clock=clock)
        self._lock = threading.Lock()  # one reading at a time, and no closing in the middle of one

    def read(self) -> Reading:
        with self._lock:
            host = self._around.read()
            seen, notes = self._nvml.read()
            gpus, about_processes = self._with_names(seen)
            if about_processes is not None:
                notes.append(about_processes)
            return Reading(time.time(), host, gpus, self._nvml.driver, tuple(notes))

    def close(self) -> None:
        """Give the driver's library back. A later reading opens it again."""
        with self._lock:
            self._nvml.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _with_names(self, seen: list[Gpu]) -> tuple[tuple[Gpu, ...], str | None]:
        held = {_key(gpu): gpu.processes for gpu in seen if gpu.processes is not None}
        named, note = self._people.name(held)
        return tuple(replace(gpu, processes=named.get(_key(gpu))) for gpu in seen), note


def _key(gpu: Gpu) -> str:
    return gpu.uuid or str(gpu.index)
