"""`torch.cuda` as the named card would answer."""

import time
import warnings
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hotloop.apps.simulate._torch import answer_below_cuda, answer_for_cudnn, leave_out_nccl
from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.dispatch import SimulatedGpu
from hotloop.apps.simulate.known import Known
from hotloop.apps.simulate.memory import MemoryListener
from hotloop.apps.simulate.replaced import Patches
from hotloop.placement.sites import user_site
from hotloop.printing.text import size

_CUDA_VERSION = "13.0"  # said on a build without CUDA, since scripts compare it
_CUDNN_VERSION = 91000  # shim.cpp says the same
_SYNC_MODES = ("default", "warn", "error")
_SHARED = (  # with torch.accelerator
    *("synchronize", "empty_cache", "memory_stats", "reset_peak_memory_stats", "reset_accumulated_memory_stats"),
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
)


# Streams, events and graphs: there is one queue, and it is always done

Wait = Callable[[str], None]


class SimulatedStream:
    """Stands in for `torch.cuda.Stream`."""

    wait: Wait = staticmethod(lambda kind: None)  # told when the host waits
    asked: Callable[[], bool] = staticmethod(lambda: True)  # whether its work is done

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.device_index, self.device_type, self.priority = 0, 1, priority
        self.stream_id = self.cuda_stream = id(self)

    def synchronize(self) -> None:
        self.wait("synchronize")

    def query(self) -> bool:
        return self.asked()

    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        event = event or SimulatedEvent()
        event.record(self)
        return event

    def __enter__(self) -> "SimulatedStream":
        return self

    def __exit__(self, *_: object) -> None: ...


class SimulatedEvent:
    """Stands in for `torch.cuda.Event`; times are those of the host, for want of others."""

    wait_told: Wait = staticmethod(lambda kind: None)

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: "SimulatedEvent") -> float:
        return max(end._at - self._at, 0.0) * 1e3

    def synchronize(self) -> None:
        self.wait_told("synchronize")

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...


class Within:
    """Stands in for `torch.cuda.stream(...)` and `torch.cuda.graph(...)`."""

    def __init__(self, first: Any = None, *_: Any, stream: Any = None, **__: Any) -> None:
        self.stream = first if stream is None else stream

    def __enter__(self) -> Any:
        return self.stream

    def __exit__(self, *_: object) -> None: ...


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`: nothing is computed in a capture, and a replay computes it all."""

    known: Known  # of the device

    def __init__(self, keep_graph: bool = False) -> None:
        self._work: list[Callable[[], None]] = []

    def capture_begin(self, *_: Any, **__: Any) -> None:
        self.known.captured = self._work = []

    def capture_end(self) -> None:
        self.known.captured = None

    def replay(self) -> None:
        for work in self._work:
            work()

    def reset(self) -> None:
        self._work = []

    def enable_debug_mode(self) -> None: ...

    def pool(self) -> tuple[int, int]:
        return (0, 0)


class Capturing(Within):
    """Stands in for `torch.cuda.graph(...)`."""

    def __init__(self, graph: Graph, *_: Any, stream: Any = None, **__: Any) -> None:
        super().__init__(stream)
        self._graph = graph

    def __enter__(self) -> Any:
        self._graph.capture_begin()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        self._graph.capture_end()


# `torch.cuda.FloatTensor` and its like, which a build without CUDA does not have

_NAMES = ("Float", "Double", "Half", "BFloat16", "Bool", "Byte", "Char", "Short", "Int", "Long")
_DTYPES = {f"{name}Tensor": getattr(torch, f"{name}Tensor").dtype for name in _NAMES}


class CudaType(type):
    """The type of such types: a call makes a tensor, `isinstance` asks for its device and numbers."""

    dtype: torch.dtype

    def __call__(cls, *args: Any) -> Any:
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.as_tensor(args[0], dtype=cls.dtype, device="cuda")
        return torch.empty(*(args or (0,)), dtype=cls.dtype, device="cuda")

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_cuda and value.dtype == cls.dtype


def _install_types(patches: Patches) -> None:
    """Put such types in place, also where they are named to be converted to or to be the default."""
    types = {name: CudaType(name, (), {"dtype": dtype}) for name, dtype in _DTYPES.items()}
    for name, kind in types.items():
        patches.set(torch.cuda, name, kind)
    convert, set_default = Tensor.type, torch.set_default_tensor_type

    def found(kind: Any) -> CudaType | None:
        return kind if isinstance(kind, CudaType) else types.get(str(kind).removeprefix("torch.cuda."))

    def converted(tensor: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        kind = found(dtype)
        return convert(tensor, dtype, *args, **kwargs) if kind is None else tensor.to("cuda", kind.dtype)

    def made_default(kind: Any) -> None:
        wanted = found(kind)
        torch.set_default_device(None if wanted is None else "cuda")
        if wanted is None:
            set_default(kind)
        else:
            torch.set_default_dtype(wanted.dtype)

    patches.set(Tensor, "type", converted)
    patches.set(torch, "set_default_tensor_type", made_default)


# `torch.cuda`


class Cuda:
    """Puts the answers of a card in place of `torch.cuda`'s own."""

    def __init__(self, card: Card, gpu: SimulatedGpu, memory: MemoryListener) -> None:
        self._card = card
        self._gpu = gpu
        self._teller = gpu.teller
        self._held = memory
        self._share = 1.0  # of memory, which this process may take
        self._sync_mode = 0  # what PyTorch does where it makes the host wait: nothing, warn, raise
        self._stream = SimulatedStream()
        self._generator = torch.Generator(device="cuda")

    def install(self, patches: Patches) -> None:
        for answers in (self._device(), self._memory_answers(), self._chance(), self._queues()):
            for name, answer in answers.items():
                for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.graphs, torch.cuda.streams):
                    if module is torch.cuda or hasattr(module, name):
                        patches.set(module, name, answer)
        patches.set(torch.backends.cuda, "is_built", lambda: True)
        patches.set(torch.backends.cudnn, "is_available", lambda: True)
        patches.set(torch.backends.cudnn, "version", lambda: _CUDNN_VERSION)
        answer_for_cudnn(patches)
        leave_out_nccl(patches)
        _install_types(patches)
        for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
            patches.set(torch.cuda.nvtx, name, lambda *_: 0)
        if torch.version.cuda is None:
            patches.set(torch.version, "cuda", _CUDA_VERSION)
        patches.set(SimulatedStream, "wait", staticmethod(self._waited))
        patches.set(SimulatedStream, "asked", staticmethod(self._not_captured))
        patches.set(SimulatedEvent, "wait_told", staticmethod(self._waited))
        patches.set(Graph, "known", self._gpu.known)
        for name in _SHARED:
            if hasattr(torch.accelerator, name):
                patches.set(torch.accelerator, name, getattr(torch.cuda, name))

    def _of(self, device: Any, answer: Any) -> Any:
        """What is asked of a GPU; one that is not there is told, and the first stands in for it."""
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        if index is not None and index > 0:
            self._gpu.findings.no_such_device(index)
        return answer

    def _exchange(self, device: Any) -> Any:
        return self._of(device, 0)

    def _memory(self, device: Any = None) -> MemoryListener:
        memory: MemoryListener = self._of(device, self._held)
        return memory

    def _waited(self, kind: str) -> None:
        self._not_captured()
        self._teller.waited(kind, user_site())

    def _set_sync_mode(self, mode: int | str) -> None:
        self._sync_mode = _SYNC_MODES.index(mode) if isinstance(mode, str) else mode

    def _not_captured(self) -> bool:
        if self._gpu.known.captured is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return True

    def synchronizes(self) -> None:
        """PyTorch makes the host wait, which it tells where it was asked to; during a capture it must not."""
        self._not_captured()
        if self._sync_mode == 1:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        elif self._sync_mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")

    def _device(self) -> dict[str, Any]:
        card = self._card
        major, minor = card.capability
        properties = SimpleNamespace(
            name=card.name, major=major, minor=minor, total_memory=card.memory, multi_processor_count=card.sms,
            warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, is_integrated=False,
            is_multi_gpu_board=False, gcnArchName="", L2_cache_size=50 << 20,
            shared_memory_per_block=49152, shared_memory_per_block_optin=101376,
            shared_memory_per_multiprocessor=102400, uuid="GPU-simulated", max_threads_per_block=1024,
            clock_rate=1_980_000, memory_clock_rate=3_201_000, memory_bus_width=5120,
        )  # fmt: skip
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": self._exchange,
            "get_device_name": lambda device=None: self._of(device, card.name),
            "get_device_capability": lambda device=None: self._of(device, (major, minor)),
            "get_device_properties": lambda device=None: self._of(device, properties),
            "is_bf16_supported": lambda including_emulation=True: major >= 8 or including_emulation,
            "is_tf32_supported": lambda: major >= 8,
            "get_arch_list": lambda: [f"sm_{major}{minor}"],
            "can_device_access_peer": lambda device, peer: device != peer,
            "ipc_collect": lambda: None,
            "utilization": lambda device=None: 0,
            "temperature": lambda device=None: 40,
            "power_draw": lambda device=None: 100_000,
            "clock_rate": lambda device=None: 1500,
            "set_sync_debug_mode": self._set_sync_mode,
            "get_sync_debug_mode": lambda: self._sync_mode,
            "cudart": lambda: SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0),
        }

    def _memory_answers(self) -> dict[str, Any]:
        def stat(name: str) -> Any:
            return lambda device=None: self._memory(device).memory_stats().get(name, 0)

        def reset(device: Any = None) -> None:
            self._memory(device).reset_peak_memory_stats()

        def share(fraction: float, device: Any = None) -> None:
            self._share = fraction
            self._memory(_numbered(device)).set_per_process_memory_fraction(fraction)

        return {
            "memory_allocated": stat("allocated_bytes.all.current"),
            "max_memory_allocated": stat("allocated_bytes.all.peak"),
            "memory_reserved": stat("reserved_bytes.all.current"),
            "max_memory_reserved": stat("reserved_bytes.all.peak"),
            "memory_cached": stat("reserved_bytes.all.current"),
            "max_memory_cached": stat("reserved_bytes.all.peak"),
            "memory_stats": lambda device=None: dict(self._memory(device).memory_stats()),
            "memory_summary": lambda device=None, abbreviated=False: self._summary(device),
            "memory_snapshot": lambda *_, **__: [],
            "mem_get_info": lambda device=None: self._memory(device).mem_get_info(),
            "reset_peak_memory_stats": reset,
            "reset_max_memory_allocated": reset,
            "reset_max_memory_cached": reset,
            "reset_accumulated_memory_stats": lambda device=None: self._memory(device).reset_accumulated_memory_stats(),
            "host_memory_stats": dict,
            "reset_accumulated_host_memory_stats": lambda: None,
            "reset_peak_host_memory_stats": lambda: None,
            "empty_cache": self._held.empty_cache,
            "set_per_process_memory_fraction": share,
            "get_per_process_memory_fraction": lambda device=None: self._of(_numbered(device), self._share),
            **answer_below_cuda(self._exchange, self._held.set_allocator_settings),
        }

    def _summary(self, device: Any) -> str:
        stats = self._memory(device).memory_stats()
        lines = [f"{name}: {size(stats[name])}" for name in sorted(stats) if name.endswith(("current", "peak"))]
        return "\n".join([f"memory of a simulated {self._card.name}", *lines])

    def _chance(self) -> dict[str, Any]:
        generator = self._generator

        def seed(number: int) -> None:
            generator.manual_seed(int(number))

        def set_state(state: Tensor, device: Any = "cuda") -> None:
            generator.set_state(state)

        def set_states(states: Iterable[Tensor]) -> None:
            for state in states:
                set_state(state)

        return {
            "manual_seed": seed,
            "manual_seed_all": seed,
            "seed": lambda: None,
            "seed_all": lambda: None,
            "initial_seed": generator.initial_seed,
            "get_rng_state": lambda device="cuda": generator.get_state(),
            "get_rng_state_all": lambda: [generator.get_state()],
            "set_rng_state": set_state,
            "set_rng_state_all": set_states,
            "default_generators": (generator,),
        }

    def _queues(self) -> dict[str, Any]:
        return {
            "synchronize": lambda device=None: self._waited("synchronize"),
            "Stream": SimulatedStream,
            "ExternalStream": SimulatedStream,
            "Event": SimulatedEvent,
            "stream": Within,
            "StreamContext": Within,
            "current_stream": lambda device=None: self._stream,
            "default_stream": lambda device=None: self._stream,
            "set_stream": lambda stream: None,
            "CUDAGraph": Graph,
            "graph": Capturing,
            "graph_pool_handle": lambda: (0, 0),
            "is_current_stream_capturing": lambda: self._gpu.known.captured is not None,
            "make_graphed_callables": lambda callables, *_, **__: callables,
        }


def _numbered(device: Any) -> Any:
    """A GPU named with its number, or by None: PyTorch's own error about the others, where PyTorch has it."""
    if device is not None and not isinstance(device, int) and torch.device(device).index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
    return device
