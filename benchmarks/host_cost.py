"""What an operation costs the host of this machine, measured on small ones that no device is slow at."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hotloop.apps.simulate._torch import OperationMode
from hotloop.apps.simulate.families import kind_of
from hotloop.apps.simulate.operations import facts
from hotloop.apps.simulate.table import HostCost
from hotloop.device.clock import synchronize
from hotloop.device.machine import cpu_name
from hotloop.printing.text import plural
from hotloop.values.tree import tensors_of

WARM, ROUNDS = 10, 100
QUEUED = 4  # rounds that the device may be behind: a full queue would make the host wait
ADDS = 50


class _Count(OperationMode):
    """Counts operations that are no views, and the tensors that foreach and fused ones are given."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.given = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [t for t in tensors_of(args) if t.dim()]  # an optimizer keeps its counts of steps on the host
        if facts(func).kernel and operands:
            self.operations += 1
            lists = kind_of(str(func)).lists
            self.given += len(operands) // lists if lists else 0
        return func(*args, **(kwargs or {}))


def measure(device: torch.device) -> HostCost:
    """Seconds of the host for each operation, while it trains as scripts do: without waiting for the device."""
    x = torch.randn(8, 16, device=device)
    layers = nn.Sequential(
        *(layer for _ in range(20) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()))
    ).to(device)
    optimizers = [_adam(count, device) for count in (10, 200)]
    taken: dict[str, list[float]] = defaultdict(list)
    counts: dict[str, _Count] = defaultdict(_Count)

    @contextmanager
    def timed(name: str, number: int) -> Iterator[None]:
        if number == 1:
            with counts[name]:
                yield
            return
        begun = time.perf_counter()
        yield
        if number >= WARM:
            taken[name].append(time.perf_counter() - begun)

    for number in range(WARM + ROUNDS):
        if number % QUEUED == 0:
            synchronize(device)
        with timed("forward", number):
            loss = layers(x).sum()
        with timed("backward", number), torch.autograd.set_multithreading_enabled(number != 1):
            loss.backward()
        for optimizer, name in zip(optimizers, ("few", "many"), strict=True):
            with timed(name, number):
                optimizer.step()
        with timed("adds", number):
            for _ in range(ADDS):
                x.add_(0.0)
    for number in range(WARM + ROUNDS):
        with timed("wait", number):
            x.sum().item()
    seconds = {name: statistics.median(each) for name, each in taken.items()}
    few, many = counts["few"], counts["many"]
    tensor = max((seconds["many"] - seconds["few"]) / max(many.given - few.given, 1), 0.0)
    other = seconds["adds"] / ADDS
    forward = seconds["forward"] / counts["forward"].operations
    return HostCost(
        forward=forward,
        backward=seconds["backward"] / counts["backward"].operations,
        # What a step costs beside its operations is told beside them.
        optimizer=min(max((seconds["few"] - few.given * tensor) / max(few.operations, 1), other / 2), forward),
        other=other,
        tensor=tensor,
        launch=other / 3,  # without Python and the dispatcher
        copy=other,
        wait=max(seconds["wait"] - other, 0.0),
        spread=0.3,  # of one host on several days
        name=f"{cpu_name()} with {plural(torch.get_num_threads(), 'thread')}",
    )


def _adam(count: int, device: torch.device) -> torch.optim.Adam:
    params = [nn.Parameter(torch.ones(8, device=device)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    return torch.optim.Adam(params, foreach=True)
