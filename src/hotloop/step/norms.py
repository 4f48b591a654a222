"""`NormReader`: the gradient norm of the last update, brought to the host without synchronization."""

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from hotloop.placement.host_copy import HostCopy
from hotloop.step.eager import EagerStep, norm_of
from hotloop.step.training import TrainingStep

_CHANGE_GRADS = ("nesterov", "maximize")  # settings with which optimizers of PyTorch write to gradients


class HasStep(Protocol):
    """A loop, whose step may be replaced."""

    @property
    def step(self) -> TrainingStep:
        """The step in use."""


class NormReader:
    """Gradient norms before clipping, by the names of the objectives.

    With clipping every step computes the norm. Else the step computes it after `ask`, or it is computed from the
    gradients that the step leaves. `read` returns what has reached the host by then.
    """

    def __init__(self, loop: HasStep) -> None:
        self._loop = loop
        self._flight: tuple[list[str], HostCopy] | None = None

    @cached_property
    def _is_possible(self) -> bool:
        """A norm of shards is a sum over ranks, all of which must ask; PyTorch has none of sparse gradients."""
        step = self._loop.step
        is_sparse = any(getattr(module, "sparse", False) is True for module in step.model.modules())
        return step.eagers[0].across.is_whole and not is_sparse

    @property
    def knows_without_asking(self) -> bool:
        """Whether a step leaves its gradients, or their norms, without `ask`."""
        step = self._loop.step
        clips = step.plan.clip_norm is not None
        return self._is_possible and (clips or all(_is_left(step, eager) for eager in step.eagers))

    def ask(self) -> None:
        """Call before a step whose norm is wanted."""
        step = self._loop.step
        if self._is_possible and step.plan.clip_norm is None:
            for eager in step.eagers:
                eager.update.ask_for_norm()

    def note(self) -> bool:
        """Start the copy of the norms to the host, after a step; returns whether there are any, not inside a window."""
        step = self._loop.step
        if not self._is_possible or self._flight is not None:
            return False
        found = {eager.trained.name: norm for eager in step.eagers if (norm := _norm(step, eager)) is not None}
        if not found:
            return False
        self._flight = list(found), HostCopy([*found.values()])
        return True

    def read(self) -> dict[str, float]:
        """The norms that have reached the host, once."""
        if self._flight is None or not self._flight[1].has_landed():
            return {}
        (names, norms), self._flight = self._flight, None
        return dict(zip(names, norms.numbers().tolist(), strict=True))


def _norm(step: TrainingStep, eager: EagerStep) -> Tensor | None:
    """The norm of the last update; None inside a window, or where it is lost."""
    norm = eager.update.told_norm()
    if norm is not None or not step.is_between_windows or not _is_left(step, eager):
        return norm
    parameters = [parameter for parameter in eager.trained.parameters if parameter.grad is not None]
    return norm_of(parameters, step.device) if parameters else None


def _is_left(step: TrainingStep, eager: EagerStep) -> bool:
    """Whether the update leaves dense gradients unchanged, so that their norm can be computed."""
    settings = (group.get(name) for o in eager.trained.optimizers for group in o.param_groups for name in _CHANGE_GRADS)
    if step.plan.clip_value is not None or step.plan.precision == "fp16" or any(settings):
        return False
    return not any(p.grad is not None and p.grad.layout is not torch.strided for p in eager.trained.parameters)
