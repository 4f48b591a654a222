"""`nn.DataParallel`, asked for or found around a model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hotloop.device.backend import backend_of
from hotloop.errors import BadArgument
from hotloop.plan import Plan
from hotloop.printing.text import plural
from hotloop.ranks.group import world_size

LAUNCH = "`hotloop launch --gpus {gpus} script.py`"
# Settings that change how the one model computes, of which copies on other GPUs know nothing.
_OTHERS = ("graph", "compile", "checkpointing", "recompute")


@dataclass(frozen=True)
class SpreadModel:
    """A model on several GPUs of one process."""

    wrapper: nn.DataParallel[Any] | None  # which is called in the model's place; None: the model itself
    gpus: int  # 0 or 1: it passes through

    @property
    def is_active(self) -> bool:
        return self.gpus > 1

    def words(self, batch: int | None = None) -> str:
        """A line that says how it trains."""
        if not self.is_active:
            there = "only one is there" if backend_of("cuda").device_count() else "none is there"
            return f"DataParallel passes through: it spreads batches over several GPUs, and {there}; {_advice()}"
        items = "" if batch is None else f": {batch} items in a step, {-(-batch // self.gpus)} on each"
        return f"DataParallel over {self.gpus} GPUs{items}; the plan stays as it was given; {_advice(self.gpus)}"


def _advice(gpus: int | str = "N") -> str:
    return f"{LAUNCH.format(gpus=gpus)} trains with DDP, which is faster"


def unwrapped(model: Any) -> tuple[Any, "nn.DataParallel[Any] | None"]:
    """The model inside a `DataParallel`, whose `state_dict` has no `module.` prefix, and the wrapper."""
    return (model.module, model) if isinstance(model, nn.DataParallel) else (model, None)


def device_of(found: "nn.DataParallel[Any] | None") -> str | None:
    """The device of a `DataParallel`'s model; None where others decide, such as several ranks."""
    return None if found is None or not found.device_ids or world_size() > 1 else f"cuda:{found.device_ids[0]}"


def through(found: "nn.DataParallel[Any] | None", device: torch.device, objective: Any) -> Any:
    """One or several objectives, called with the `DataParallel` they were written for."""
    if found is None or (found.device_ids and backend_of(device).is_host) or world_size() > 1:
        return objective
    if isinstance(objective, Mapping):
        return {name: through(found, device, each) for name, each in objective.items()}
    return objective if objective is None or isinstance(objective, nn.Module) else Through(found, objective)


@dataclass(frozen=True)
class Through:
    """An objective written for a `DataParallel`, which may use its `module`."""

    wrapper: nn.DataParallel[Any]
    objective: Callable[[Any, Any], Any]

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        return self.objective(self.wrapper, batch)


def spread_over_gpus(model: nn.Module, found: "nn.DataParallel[Any] | None", plan: Plan) -> SpreadModel | None:
    """The `DataParallel` that was found around a model, or that the plan asks for; None where neither."""
    if found is None and plan.parallel != "data_parallel":
        return None
    backend = backend_of(plan.device)
    if found is None and backend.device_count() > 1:
        found = nn.DataParallel(model)
    elif found is not None and found.device_ids and backend.is_host:
        found = None  # it would look for the model on a GPU
    spread = SpreadModel(found, 0 if found is None else len(found.device_ids))
    others = [name for name in _OTHERS if getattr(plan, name) != getattr(Plan, name)]
    if spread.is_active and others:
        raise BadArgument(
            f"DataParallel over {spread.gpus} GPUs with {', '.join(others)} in the plan",
            fix=f"leave that out, or use DDP: {LAUNCH.format(gpus=spread.gpus)}",
        )
    return spread


def refuse_own_loss(spread: SpreadModel | None, *, has_loss: bool) -> None:
    """Raise for a model that computes its own loss: it returns one for each GPU."""
    if spread is not None and spread.is_active and not has_loss:
        raise BadArgument(
            f"DataParallel gives a loss for each of {plural(spread.gpus, 'GPU')} where the model computes its own",
            fix=f"give loss= or an objective that takes their mean; or use DDP: {LAUNCH.format(gpus=spread.gpus)}",
        )
