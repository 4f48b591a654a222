"""Streams, events and graphs of the simulated device: there is one queue, and it is always done."""

import time
from collections.abc import Callable
from typing import Any

import torch

Wait = Callable[[str], None]


class SimulatedStream:
    """Stands in for `torch.cuda.Stream`."""

    wait: Wait = staticmethod(lambda kind: None)  # told when the host waits

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.device_index, self.device_type, self.priority = 0, 1, priority
        self.stream_id = self.cuda_stream = id(self)

    def synchronize(self) -> None:
        self.wait("synchronize")

    def query(self) -> bool:
        return True

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
    """Stands in for `torch.cuda.CUDAGraph`: what is captured runs once, and a replay does nothing."""

    def __init__(self, keep_graph: bool = False) -> None: ...
    def capture_begin(self, *_: Any, **__: Any) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...
    def reset(self) -> None: ...
    def enable_debug_mode(self) -> None: ...

    def pool(self) -> tuple[int, int]:
        return (0, 0)
