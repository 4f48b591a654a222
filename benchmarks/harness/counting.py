"""What a step costs on paper: its operations, and the bytes that they read and write in plain PyTorch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from harness.contestants.by_hand import to
from harness.workloads import Workload
from hotloop._torch import UNSAFE_VIEW, DispatchMode, schema_of
from hotloop.profiling.flops import ATTENTION
from hotloop.values.tree import tensors_of

aten = torch.ops.aten
TABLES = {aten.embedding, aten.index, aten.index_select, aten.gather}  # they read what they pick, not the whole table
UNTOUCHED = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, *UNSAFE_VIEW}


@dataclass(frozen=True)
class Count:
    """Operations and bytes."""

    flops: float
    traffic: float


def counted(step: Callable[[], Any]) -> Count:
    """What a call computes and moves.

    >>> layer, x = torch.nn.Linear(8, 4), torch.ones(2, 8)
    >>> counted(lambda: layer(x))
    Count(flops=128, traffic=240)
    """
    counter = FlopCounterMode(display=False, custom_mapping=ATTENTION)
    with counter, ByteCounterMode() as traffic:
        step()
    return Count(counter.get_total_flops(), traffic.bytes)


def count_of(workload: Workload, device: torch.device) -> Count:
    """Operations and bytes of one unit: a plain step, forward, backward and update, over what its batch holds."""
    parts = workload.parts()
    model = parts.model.to(device).train()
    batch = parts.transformed(to(next(iter(parts.loader)), device))

    def step() -> None:
        for objective, optimizer in parts.updates:
            optimizer.zero_grad()
            objective(model, batch).backward()
            optimizer.step()

    step()  # the first one also makes the optimizer's state
    count = counted(step)
    units = workload.units_per_item * min(workload.batch, workload.items)
    return Count(count.flops / units, count.traffic / units)


class ByteCounterMode(DispatchMode):
    """Adds up the bytes that each operation reads and writes; views and fresh memory cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if func.is_view or packet in UNTOUCHED:
            return result
        reads, writes = _tensors((args, kwargs)), _tensors(result)
        if packet in TABLES:
            self.bytes += _size(writes) - _size(reads[:1])
        if schema_of(func).is_mutable and not writes:  # operations on whole lists change them and return nothing
            writes = _tensors(args[0])
        self.bytes += _size(reads) + _size(writes)
        return result


def _tensors(nested: Any) -> list[Tensor]:
    return tensors_of(nested)


def _size(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; what is only repeated, as after `expand`, lies in memory once."""
    total = 0
    for tensor in tensors:
        count = tensor.element_size() if tensor.numel() else 0
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            count *= size if stride else 1
        total += count
    return total
