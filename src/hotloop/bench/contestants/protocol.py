"""What a contestant is: a call that gets ready, and gives a call that trains and says how long it took."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hotloop.bench.workloads import TrainingParts
from hotloop.clock import synchronize
from hotloop.plan import Plan

Run = Callable[[int], float]  # trains so many epochs; the seconds of the training proper


@dataclass(frozen=True)
class Started:
    """A contestant that is ready."""

    run: Run
    note: str = ""
    plan: Plan | None = None  # where it is hotloop


Start = Callable[[TrainingParts, torch.device], Started]


def timed(epochs: Callable[[int], object], device: torch.device) -> Run:
    """`epochs(count)` between two readings of the clock, each when the device has nothing left to do."""

    def run(count: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        epochs(count)
        synchronize(device)
        return time.perf_counter() - start

    return run
