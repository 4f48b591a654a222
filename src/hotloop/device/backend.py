"""`Backend`: what a device has, and how PyTorch is asked for it. This file alone tells cuda, mps, xpu and cpu apart.

Another accelerator is another class in `BACKENDS`: nothing else asks for the type of a device.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hotloop.plan import Precision


class Backend:
    """One device. The base has nothing special: work is done when a call returns, and what it does not tell is None.

    PyTorch's functions are looked up in every call, since `hotloop.simulate` replaces them for a while.
    """

    is_host = False  # its memory is the main memory
    non_blocking = False  # copies from and to pinned memory run beside the host, in the order of streams and events
    can_capture = False  # work is captured in a graph, and replayed
    tells_memory = False  # how much is free, and the peak
    compiles = False  # `torch.compile` is tried
    has_fused_optimizers = False
    has_tf32 = False  # matmuls in fp32 may round their inputs
    has_sync_batchnorm = False
    has_rng = False  # a generator of its own
    widest_float = torch.float64
    collectives: str | None = None  # what torch.distributed sends by between several of them
    profiler_activity: str | None = None  # its name as an activity of PyTorch's profiler
    called = "device"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = getattr(torch, device.type, None)  # such as torch.cuda

    # Which one it is

    def device_name(self) -> str:
        return str(self.device)

    def names(self) -> Sequence[str]:
        """The names of all devices of this kind that PyTorch can use."""
        return ()

    def device_count(self) -> int:
        return len(self.names())

    def is_initialized(self) -> bool:
        """Whether this process has begun to use devices of this kind."""
        return True

    def uuid(self) -> str | None:
        return None

    def monitor_ids(self) -> Collection[int | str]:
        """What the monitor knows it by."""
        return ()

    def cudnn_version(self) -> int | None:
        return None

    def half_precision(self) -> Precision | None:
        """The half precision that a GPU has fast arithmetic for."""
        return None

    # Memory, in bytes

    def memory_allocated(self) -> int | None:
        """In live tensors."""
        return None

    def memory_reserved(self) -> int | None:
        """That PyTorch's allocator holds, the allocated part included."""
        return None

    def max_memory_allocated(self) -> int | None:
        return None

    def reset_peak_memory_stats(self) -> None: ...

    def memory_stats(self) -> Mapping[str, int]:
        """The figures of PyTorch's caching allocator."""
        return {}

    def mem_get_info(self) -> tuple[int | None, int | None]:
        """Free, whoever may take it, and total."""
        return None, None

    def total_memory(self) -> int | None:
        return None

    def memory_share(self) -> float:
        """The share of the memory that this process may take."""
        return 1.0

    def free_memory(self) -> int | None:
        """What nobody has: other processes and a cap are counted in."""
        return None

    def room(self) -> int | None:
        """What could still be taken: the free memory, and what PyTorch holds for later."""
        return None

    def empty_cache(self) -> None: ...

    def has_expandable_segments(self) -> bool:
        """Whether PyTorch's allocator can use segments that grow."""
        return False

    # Its generator, where it `has_rng`

    def get_rng_state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state(self.device)
        return state

    def set_rng_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state, self.device)

    def generator(self) -> torch.Generator | None:
        """Its global generator, where PyTorch hands that out."""
        return None

    # Queued work; streams and events where it is `non_blocking`

    def synchronize(self) -> None:
        """Wait until everything queued is done."""

    def synchronizing(self) -> Sequence[tuple[Any, str]]:
        """Whose `synchronize` a person may call, and by what name the profiler knows each."""
        return ()

    def current(self) -> AbstractContextManager[Any]:
        """Make it the current device inside the block."""
        return nullcontext()

    def set_current(self) -> None:
        self._module.set_device(self.device)

    def new_stream(self) -> Any:
        return self._module.Stream(self.device)

    def current_stream(self) -> Any:
        return self._module.current_stream(self.device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one inside the block."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def set_stream(self, stream: Any) -> None:
        self._module.set_stream(stream)

    def new_event(self, **options: bool) -> Any:
        return self._module.Event(**options)

    def is_ordinary_stream(self) -> bool:
        """Whether work goes to the default stream, outside of a capture, and may synchronize."""
        return True

    # Graphs, where it `can_capture`

    def graph_pool(self) -> Any:
        """Memory that graphs can share."""
        return self._module.graph_pool_handle()

    def capturing(self, graph: Any, stream: Any, pool: Any = None) -> AbstractContextManager[Any]:
        """Capture what runs inside the block."""
        # Other threads, such as a loader's pinning thread, may go on allocating meanwhile.
        context: AbstractContextManager[Any] = self._module.graph(
            graph, pool, stream=stream, capture_error_mode="thread_local"
        )
        return context


class CpuBackend(Backend):
    """The processor, whose memory is the main memory."""

    is_host = compiles = has_fused_optimizers = True


class Accelerator(Backend):
    """A device that works beside the host, as PyTorch presents every kind of it."""

    has_rng = True
    called = "accelerator"

    def names(self) -> Sequence[str]:
        if not self._module.is_available():
            return ()
        return tuple(str(self._module.get_device_name(index)) for index in range(self._module.device_count()))

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)


class CudaBackend(Accelerator):
    """NVIDIA's GPUs, and AMD's, which PyTorch presents by the same name."""

    non_blocking = can_capture = tells_memory = True
    compiles = has_fused_optimizers = True
    has_tf32 = has_sync_batchnorm = True
    collectives = "nccl"
    profiler_activity = "CUDA"
    called = "GPU"

    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def device_count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def is_initialized(self) -> bool:
        return bool(torch.cuda.is_initialized())

    def uuid(self) -> str:
        return str(getattr(torch.cuda.get_device_properties(self.device), "uuid", ""))

    def monitor_ids(self) -> Collection[int | str]:
        return [self.uuid()]  # CUDA may count GPUs in another order than the driver does

    def cudnn_version(self) -> int | None:
        version: int | None = torch.backends.cudnn.version()
        return version

    def half_precision(self) -> Precision | None:
        precision = precision_for(torch.cuda.get_device_capability(self.device))
        return None if precision == "fp32" else precision

    def memory_allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def memory_reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def max_memory_allocated(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak_memory_stats(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def memory_stats(self) -> Mapping[str, int]:
        return torch.cuda.memory_stats(self.device)

    def mem_get_info(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.device)

    def total_memory(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def memory_share(self) -> float:
        # PyTorch refuses "cuda" without a number here, unlike where it tells of memory.
        return torch.cuda.get_per_process_memory_fraction(self.device.index)

    def free_memory(self) -> int:
        unused, total = self.mem_get_info()
        return min(unused, int(total * self.memory_share()) - self.memory_reserved())

    def room(self) -> int:
        return self.free_memory() + self.memory_reserved() - self.memory_allocated()

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def has_expandable_segments(self) -> bool:
        on_linux = sys.platform == "linux" and torch.version.cuda is not None
        return on_linux and bool(torch.cuda.get_allocator_backend() == "native")

    def generator(self) -> torch.Generator:
        index = self.device.index
        return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]

    def synchronizing(self) -> Sequence[tuple[Any, str]]:
        if not torch.cuda.is_available():
            return ()
        return (
            (torch.cuda, "cudaDeviceSynchronize"),
            (torch.cuda.Event, "cudaEventSynchronize"),
            (torch.cuda.Stream, "cudaStreamSynchronize"),
        )

    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def is_ordinary_stream(self) -> bool:
        is_default = torch.cuda.current_stream(self.device) == torch.cuda.default_stream(self.device)
        return is_default and not torch.cuda.is_current_stream_capturing() and not torch.cuda.get_sync_debug_mode()


class MpsBackend(Accelerator):
    """The GPU of a Mac, which shares the main memory and knows one queue."""

    has_fused_optimizers = True
    widest_float = torch.float32  # Metal has no float64
    called = "GPU of a Mac"

    def names(self) -> Sequence[str]:
        return (self.called,) if torch.backends.mps.is_available() else ()

    def monitor_ids(self) -> Collection[int | str]:
        return [0]

    def memory_allocated(self) -> int:
        return torch.mps.current_allocated_memory()

    def memory_reserved(self) -> int:
        return torch.mps.driver_allocated_memory()

    def mem_get_info(self) -> tuple[None, int]:
        return None, torch.mps.recommended_max_memory()

    def empty_cache(self) -> None:
        torch.mps.empty_cache()

    def get_rng_state(self) -> Tensor:
        return torch.mps.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.mps.set_rng_state(state)


class XpuBackend(Accelerator):
    """Intel's GPUs. What they tell of memory is not used: some refuse to."""

    has_fused_optimizers = True
    profiler_activity = "XPU"
    called = "Intel GPU"


BACKENDS: dict[str, type[Backend]] = {
    "cuda": CudaBackend,
    "mps": MpsBackend,
    "xpu": XpuBackend,
    "cpu": CpuBackend,
}  # the best first


@cache
def backend_of(device: str | torch.device) -> Backend:
    """What there is to know of a device: the same object every time.

    >>> backend_of("cpu").is_host, backend_of("cpu").non_blocking
    (True, False)
    """
    if isinstance(device, str):
        return backend_of(torch.device(device))
    return BACKENDS.get(device.type, Backend if device.type == "meta" else Accelerator)(device)


def is_capturing() -> bool:
    """Whether what happens now is captured into a graph: it does not run yet."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def precision_for(capability: tuple[int, int]) -> Precision:
    """The fastest precision that a GPU of this compute capability has hardware for.

    >>> precision_for((8, 0)), precision_for((7, 5)), precision_for((6, 1))
    ('bf16', 'fp16', 'fp32')
    """
    if capability >= (8, 0):
        return "bf16"
    return "fp16" if capability >= (7, 0) else "fp32"
