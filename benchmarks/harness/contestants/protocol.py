"""What a contestant is: a call that gets ready, and gives a call that trains and says how long it took."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.workloads import TrainingParts
from hotloop.device import pick
from hotloop.device.clock import synchronize
from hotloop.errors import HotloopError
from hotloop.plan import Plan

Run = Callable[[int], float]  # trains so many epochs; the seconds of the training proper
Losses = list[Tensor]  # of one batch, one for each objective


@dataclass(frozen=True)
class Started:
    """A contestant that is ready."""

    run: Run
    note: str = ""
    plan: Plan | None = None  # where it is hotloop
    steps: Callable[[], Iterator[Losses]] | None = None  # the same training a step at a time, without an end


class DoesNotApply(HotloopError):
    """A contestant that is not made for a workload, as the Trainer of Hugging Face is for its own models."""


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


def has_bf16(device: torch.device) -> bool:
    """Whether a careful person would train in bf16 there."""
    return device.type == "cuda" and pick(device).precision == "bf16"
