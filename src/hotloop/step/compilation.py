"""Objectives as the compiler makes them."""

import warnings
from typing import Any

import torch
from torch import nn

from hotloop.objective import Objective
from hotloop.step.inspection import signature

MODES = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}  # the graphs are captured here, of whole steps


class CompiledObjective:
    """An objective that is compiled for batches of one form, that of the first one; others run eagerly."""

    def __init__(self, objective: Objective, mode: str) -> None:
        self._objective = objective
        self._compiled = torch.compile(objective, mode=MODES[mode], dynamic=False)
        self._form: Any = None
        self._has_run = False

    def begin_anew(self) -> None:
        """Batches of another form follow, such as micro-batches of another size."""
        self._form = None

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        form = signature(batch)
        if self._form is None:
            self._form = form
        if form is None or form != self._form:
            return self._objective(model, batch)
        if self._has_run:
            return self._compiled(model, batch)
        self._has_run = True
        with warnings.catch_warnings():  # the compiler's advice is about what the levers try
            warnings.filterwarnings("ignore", module=r"torch\._inductor")
            return self._compiled(model, batch)
