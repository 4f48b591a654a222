"""`GradientNorms`: the norm of the gradient in steps that are logged, without a synchronization."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hotloop.step.eager import EagerStep, norm_of
from hotloop.step.sharding import is_sharded
from hotloop.step.training import TrainingStep
from hotloop.training.core import Core


class GradientNorms:
    """Norms of the gradient before it is clipped, by the names that a log has for them.

    Where the gradient is clipped, its norm is there in every step. Elsewhere it is computed in the steps that are
    logged. The host reads what has come from the device by then, so that a log may be one entry behind.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._flight: tuple[list[str], Tensor, torch.cuda.Event | None] | None = None
        self._is_possible = not is_sharded(core.model)  # a norm of shards is a sum over ranks, all of which must ask

    def ask(self) -> None:
        """Before a step that is logged."""
        step = self._core.step
        if self._is_possible and step.plan.clip_norm is None:
            for eager in step.eagers:
                eager.asks_for_norm = True

    def note(self) -> None:
        """After it: send the norms to the host. In the middle of an accumulation window there are none."""
        step = self._core.step
        if not self._is_possible or self._flight is not None:
            return
        found = {eager.trained.name: norm for eager in step.eagers if (norm := _norm(step, eager)) is not None}
        if not found:
            return
        if step.plan.clip_norm is None:
            for eager in step.eagers:
                eager.norm = None  # it is that of one step, and told once
        names = ["gradient norm" if len(step.eagers) == 1 else f"gradient norm/{name}" for name in found]
        norms, event = torch.stack([norm.detach().float() for norm in found.values()]), None
        if norms.is_cuda:
            norms = torch.empty(norms.shape, pin_memory=True).copy_(norms, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._flight = names, norms, event

    def read(self) -> dict[str, float]:
        """What has come, once."""
        if self._flight is None or not (self._flight[2] is None or self._flight[2].query()):
            return {}
        (names, norms, _), self._flight = self._flight, None
        values: Sequence[float] = norms.tolist()
        return dict(zip(names, values, strict=True))


def _norm(step: TrainingStep, eager: EagerStep) -> Tensor | None:
    """The norm in the last update; None where the window is not full, or nobody knows it any more."""
    if eager.norm is not None or step.captured is None or not step.is_between_windows:
        return eager.norm
    # A replay leaves its gradients, but for what the update itself has changed in them.
    settings = (group.get(name) for o in eager.trained.optimizers for group in o.param_groups for name in _CHANGE_GRADS)
    if step.plan.clip_value is not None or step.plan.precision == "fp16" or any(settings):
        return None
    parameters = [parameter for parameter in eager.trained.parameters if parameter.grad is not None]
    return norm_of(parameters, step.device) if parameters else None


_CHANGE_GRADS = ("nesterov", "maximize")  # settings with which optimizers of PyTorch write to gradients
