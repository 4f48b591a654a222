"""Copies of tensors as they are now, taken without waiting for a device, and their way to the host afterwards."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby

import torch
from torch import Tensor

from hotloop.checkpoint.tensorfile import HostSource, Source, TensorEntry, bytes_of, in_file_order
from hotloop.device.backend import backend_of

BLOCK = 1 << 24  # bytes of a pinned buffer; a power of two, to which PyTorch would round it up


class Snapshots:
    """Takes snapshots, one at a time, and keeps its pinned buffers and streams for the next."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._buffers: list[Tensor] = []  # pinned, not in use

    def take(self, tensors: Mapping[str, Tensor]) -> list[Source]:
        """Sources for a file that hold the values of this moment, whatever happens to the tensors later."""
        ordered = in_file_order(tensors)
        roomy = {device: _has_room(device, ordered.values()) for device in {t.device for t in ordered.values()}}
        sources: list[Source] = []
        for device, run in groupby(ordered.items(), key=lambda item: item[1].device):
            sources.append(self._copy(device, dict(run), roomy=roomy[device]))
        return sources

    def clear(self) -> None:
        """Free the pinned memory."""
        self._buffers.clear()

    def _copy(self, device: torch.device, tensors: dict[str, Tensor], *, roomy: bool) -> Source:
        backend = backend_of(device)
        if not backend.non_blocking:
            return HostSource(_cloned(tensors))
        if roomy:
            try:
                clones = _cloned(tensors)
            except torch.OutOfMemoryError:  # there was room, but not in one piece
                pass
            else:
                ready = backend.current_stream().record_event()
                return _DeviceSource(clones, ready, self._stream(device), self._buffers)
        return _PinnedSource(device, tensors, self._buffers)

    def _stream(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = backend_of(device).new_stream()
        return self._streams[device]


class _DeviceSource:
    """Copies on the device, which come to the host through two buffers when they are asked for."""

    def __init__(
        self, clones: dict[str, Tensor], ready: torch.Event, stream: torch.Stream, spare: list[Tensor]
    ) -> None:
        self.entries = {name: TensorEntry.of(tensor) for name, tensor in clones.items()}
        self._clones = clones
        self._ready = ready
        self._stream = stream
        self._spare = spare

    def chunks(self) -> Iterator[memoryview]:
        """While one buffer is hashed and written, the other is filled."""
        buffers = [_pinned(self._spare), _pinned(self._spare)]
        self._stream.wait_event(self._ready)
        try:
            waiting: tuple[Tensor, torch.Event] | None = None
            for number, pieces in enumerate(portions(self._clones.values(), BLOCK)):
                with backend_of(self._stream.device).on_stream(self._stream):
                    arriving = _fill(buffers[number % 2], pieces), _mark(self._stream)
                if waiting is not None:
                    yield from _arrived(*waiting)
                waiting = arriving
            if waiting is not None:
                yield from _arrived(*waiting)
        finally:
            _mark(self._stream).synchronize()  # a write that failed leaves a copy under way
            self._spare.extend(buffers)


class _PinnedSource:
    """Copies in pinned memory of the host, on their way there since they were taken."""

    def __init__(self, device: torch.device, tensors: dict[str, Tensor], spare: list[Tensor]) -> None:
        self.entries = {name: TensorEntry.of(tensor) for name, tensor in tensors.items()}
        self._spare = spare
        self._filled: list[tuple[Tensor, Tensor]] = []  # a buffer, and the part of it that is used
        for pieces in portions(tensors.values(), BLOCK):
            buffer = _pinned(spare)
            self._filled.append((buffer, _fill(buffer, pieces)))
        self._ready = _mark(backend_of(device).current_stream())

    def chunks(self) -> Iterator[memoryview]:
        self._ready.synchronize()
        try:
            for _, used in self._filled:
                yield from bytes_of(used)
        finally:
            self._spare.extend(buffer for buffer, _ in self._filled)


def portions(tensors: Iterable[Tensor], room: int) -> Iterator[list[Tensor]]:
    """The bytes of tensors, one after another, in portions that fill a buffer of `room` bytes each.

    >>> [[piece.numel() for piece in portion] for portion in portions([torch.zeros(3), torch.zeros(2)], 8)]
    [[8], [4, 4], [4]]
    """
    portion: list[Tensor] = []
    left = room
    for tensor in tensors:
        rest = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else None
        while rest is not None and rest.numel():
            piece, rest = rest[:left], rest[left:]
            portion.append(piece)
            left -= piece.numel()
            if not left:
                yield portion
                portion, left = [], room
    if portion:
        yield portion


def fits(need: int, *, free: int, reserved: int, peak: int) -> bool:
    """Whether copies of `need` bytes leave as much again to training, which will want its peak once more.

    >>> fits(10, free=12, reserved=58, peak=50), fits(10, free=0, reserved=100, peak=95)
    (True, False)
    """
    return 2 * need <= free + max(0, reserved - peak)


def _has_room(device: torch.device, tensors: Iterable[Tensor]) -> bool:
    backend = backend_of(device)
    unused = backend.free_memory()
    if unused is None:
        return True
    need = sum(tensor.nbytes for tensor in tensors if tensor.device == device)
    reserved, peak = backend.memory_reserved() or 0, backend.max_memory_allocated() or 0
    return fits(need, free=unused, reserved=reserved, peak=peak)


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def _pinned(spare: list[Tensor]) -> Tensor:
    return spare.pop() if spare else torch.empty(BLOCK, dtype=torch.uint8, device="cpu", pin_memory=True)


def _fill(buffer: Tensor, pieces: list[Tensor]) -> Tensor:
    """Start copies into a buffer, one after another, and return the part that they fill."""
    position = 0
    for piece in pieces:
        buffer[position : position + piece.numel()].copy_(piece, non_blocking=True)
        position += piece.numel()
    return buffer[:position]


def _mark(stream: torch.Stream) -> torch.Event:
    """The point that a stream has come to, for a thread that sleeps until it is reached."""
    event: torch.Event = backend_of(stream.device).new_event(blocking=True)
    event.record(stream)
    return event


def _arrived(used: Tensor, event: torch.Event) -> Iterator[memoryview]:
    event.synchronize()
    yield from bytes_of(used)
