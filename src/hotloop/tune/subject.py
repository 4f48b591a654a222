"""`Subject`: the model, objectives and optimizers that a plan is for."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from hotloop._torch import gradient_hooks
from hotloop.data.on_device import why_not_resident
from hotloop.device.backend import Backend, backend_of
from hotloop.levers import LeverTarget
from hotloop.levers.channels_last import to_memory_format
from hotloop.levers.tf32 import fp32_matmul_precision
from hotloop.plan import Plan
from hotloop.step.inspection import signature
from hotloop.step.trained_objectives import TrainedObjective
from hotloop.step.training import TrainingStep
from hotloop.values.code import code_of_modules
from hotloop.values.reach import Skip, look, restored_by_state
from hotloop.values.snapshot import objects_in
from hotloop.version import __version__


@dataclass(frozen=True)
class Subject:
    """What is trained."""

    model: nn.Module
    modules: Sequence[nn.Module]  # the model, and what else a step may change
    objectives: tuple[TrainedObjective, ...]
    averages: bool
    plan: Plan  # to begin with
    pinned_precision: bool
    device_name: str
    on_ranks: bool = False  # whether several processes train together

    @cached_property
    def device(self) -> torch.device:
        return torch.device(self.plan.device)

    @cached_property
    def backend(self) -> Backend:
        return backend_of(self.device)

    @property
    def optimizers(self) -> list[Any]:
        return [optimizer for each in self.objectives for optimizer in each.optimizers]

    def scene(self, loader: object) -> LeverTarget:
        return LeverTarget(
            self.device,
            self.model,
            self.optimizers,
            self.pinned_precision,
            why_not_resident(loader, self.device),
            isinstance(loader, DataLoader) and loader.pin_memory,
            "between steps of a loop by hand somebody may `.view` the weights" if loader is None else None,
            "deterministic algorithms are asked for" if torch.are_deterministic_algorithms_enabled() else None,
            self.on_ranks,
        )

    def step_for(self, plan: Plan, **options: Any) -> TrainingStep:
        """The step of a plan, with options of `TrainingStep`; without them one for trials, which no OOM retry repeats
        and whose losses nobody hears of."""
        return TrainingStep(self.model, self.objectives, plan, averages=self.averages, **options)

    def roots(self, more: Mapping[str, object] | None = None, batch: Any = None) -> dict[str, object]:
        """Objects from which a step on a batch may reach Python state, by the names that a person knows."""
        several = len(self.objectives) > 1
        objectives = {each.name if several else "objective": each.objective for each in self.objectives}
        optimizers = {"optimizer" if i == 0 else f"optimizer {i + 1}": o for i, o in enumerate(self.optimizers)}
        hooks = {
            f"the hooks of {name}": gradient_hooks(p) for name, p in self.model.named_parameters() if gradient_hooks(p)
        }
        parts = list(objects_in(batch))
        given = {"batch": parts[0] if len(parts) == 1 else parts} if parts else {}
        return {"model": self.model, **(more or {}), **objectives, **optimizers, **hooks, **given}

    def forward(self, batch: Any) -> None:
        """The forward passes alone, to explain an error in one."""
        for each in self.objectives:
            each.objective(self.model, batch)

    def restorable(self) -> Skip:
        """Which of that `scratch` restores."""
        return restored_by_state(self.modules, self.optimizers)

    def exchange(self, old: TrainingStep | None, new: TrainingStep | None) -> None:
        """Revert the levers of one step and apply those of another; None: the model as written."""
        if old is not None:
            old.levers.revert()
            if old.plan.channels_last and not (new is not None and new.plan.channels_last):
                to_memory_format(self.modules, self.optimizers, torch.contiguous_format)
        if new is not None:
            if new.plan.channels_last:
                to_memory_format(self.modules, self.optimizers, torch.channels_last)
            new.levers.apply()

    def key(self, batch: Any, loader: object, transform: object = None) -> str:
        """A cache key of everything that a plan depends on: model, device, data, code."""
        weights = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in self.model.named_parameters()]
        traits = [
            [f"{name}:{type(module).__qualname__}" for name, module in self.model.named_modules()],
            weights,
            repr(signature(batch)),
            [(type(o).__qualname__, _flags(o)) for o in self.optimizers],
            [self.plan.to_json(), self.pinned_precision, why_not_resident(loader, self.device) is None],
            [self.device_name, torch.__version__, __version__, fp32_matmul_precision()],
            [code_of_modules(self.model.modules()), look(self.roots({"device_transform": transform})).code()],
        ]
        return hashlib.sha256(json.dumps(traits, default=str).encode()).hexdigest()[:32]


def _flags(optimizer: Any) -> list[str]:
    return [
        str({k: group.get(k) for k in ("fused", "foreach", "amsgrad", "nesterov")}) for group in optimizer.param_groups
    ]
