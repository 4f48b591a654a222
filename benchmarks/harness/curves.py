"""The losses of the tutorial's loop and of hotloop from the same weights over the same batches."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

import hotloop
from harness.contestants.by_hand import tutorial_steps
from harness.contestants.hot import loop_of
from harness.records import Curves
from harness.workloads import TrainingParts, Workload
from hotloop.plan import Plan


def curves(
    workload: Workload,
    device: torch.device,
    steps: int,
    *,
    plan: Plan | Literal["plain"] | None = None,
    plan_for: float = 3600,
) -> Curves:
    """The loss of each step: the tutorial's, hotloop's, and the tutorial's again with another rng state.

    Without a `plan`, the loop is tuned first.
    """

    def hot(parts: TrainingParts) -> Iterator[Tensor]:
        loop = loop_of(parts, device, plan or "auto")
        if plan is None:
            loop.tune(parts.loader, seconds=plan_for, device_transform=parts.device_transform, progress=False)
        return _hot(loop, parts)

    def tutorial(parts: TrainingParts) -> Iterator[Tensor]:
        return (torch.stack(losses).sum() for losses in tutorial_steps(parts, device))

    return Curves(
        workload=workload.name,
        device=str(device),
        steps=tuple(range(1, steps + 1)),
        tutorial=_losses(workload, tutorial, steps, workload.seed),
        hotloop=_losses(workload, hot, steps, workload.seed),
        again=_losses(workload, tutorial, steps, workload.seed + 1),
    )


def _losses(
    workload: Workload, start: Callable[[TrainingParts], Iterator[Tensor]], steps: int, seed: int
) -> tuple[float, ...]:
    parts = workload.parts()
    losses = start(parts)
    # Getting ready may have drawn numbers; the training itself begins with the same ones for each loop.
    torch.manual_seed(seed)
    assert parts.loader.generator is not None
    parts.loader.generator.manual_seed(workload.seed)
    taken = [loss.detach().clone() for loss in islice(losses, steps)]  # a graph writes the next loss to the same place
    return tuple(torch.stack(taken).float().tolist())


def _hot(loop: hotloop.Loop, parts: TrainingParts) -> Iterator[Tensor]:
    while True:
        for batch in loop.batches(parts.loader, device_transform=parts.device_transform):
            yield loop.step(batch)
