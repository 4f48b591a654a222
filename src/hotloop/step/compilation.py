"""`CompiledObjective`: an objective that its first call compiles."""

import warnings
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from hotloop._torch import inductor
from hotloop.errors import PlanWarning
from hotloop.levers.compile import Varying, form_of, mark_varying, sizes_of, varying_between
from hotloop.objective.objectives import Objective
from hotloop.step.inspection import signature

MODES = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}  # the graphs are captured here, of whole steps
MOST_COMPILATIONS = 4  # compilations of one objective; what varies more than that runs eagerly
IMPORTS, CACHED_SHARE = 5.0, 0.1  # seconds to load the compiler, and the share of a compilation that is not cached


class CompiledObjective:
    """An objective compiled for batches of the form of the first one; others run eagerly.

    `varying`: dynamic dimensions of the batch's tensors. Where others turn out to vary, it is compiled once more with
    these dynamic too; not for the smaller last batch of an epoch. `obstacle` says why it is eager.
    """

    def __init__(self, objective: Objective, mode: str, varying: Varying = frozenset()) -> None:
        self._objective = objective
        self._mode, self._varying = mode, varying
        self._form: Hashable = None
        self._sizes: Any = None  # the batch whose form it is, without its numbers
        self._is_new = True  # nothing was compiled yet for what varies
        self._compilations = 0
        self.obstacle: str | None = None
        self._compiled: Objective | None = None  # with "blocks", which the model has compiled inside
        if mode in MODES:
            self._compiled = _compiled(objective, mode, varying)

    def begin_anew(self) -> None:
        """Accept batches of another form from now on, such as micro-batches of another size."""
        self._form = None

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if self._compiled is None or self.obstacle is not None:
            return self._objective(model, batch)
        form = form_for(batch, self._varying)
        if self._form is None:
            self._form, self._sizes = form, sizes_of(batch)
        if form is None or (form != self._form and not self._takes_any_size_of(batch)):
            return self._objective(model, batch)
        backend = inductor(MODES[self._mode])
        before = backend.graphs
        if not self._is_new:
            returned = self._compiled(model, batch)
        else:
            self._is_new = False
            mark_varying(batch, self._varying)
            with warnings.catch_warnings():  # the compiler's advice is about what the levers try
                warnings.filterwarnings("ignore", module=r"torch\._inductor")
                warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
                returned = self._compiled(model, batch)
        if backend.graphs > before:
            self._count()
        return returned

    def _takes_any_size_of(self, batch: Any) -> bool:
        """Compile again with the dimensions dynamic in which this batch differs, where that is worth it."""
        if self._sizes is None:
            return False
        varying = varying_between(self._sizes, batch)
        if varying is None or not worth_compiling_for(varying - self._varying):
            return False
        self._varying |= varying
        self._form, self._is_new = form_for(self._sizes, self._varying), True
        self._compiled = _compiled(self._objective, self._mode, self._varying)
        return self._form is not None

    def _count(self) -> None:
        self._compilations += 1
        if self._compilations > MOST_COMPILATIONS:
            self.obstacle = f"{MOST_COMPILATIONS} compilations of the step were not enough for what varies in it"
            warnings.warn(f"the step runs eagerly from here on: {self.obstacle}", PlanWarning, stacklevel=4)


def _compiled(objective: Objective, mode: str, varying: Varying) -> Objective:
    """`torch.compile`; Dynamo shares compiled code between calls with the same arguments."""
    dynamic = None if varying else False  # None: where it is marked; False would ignore marks
    return torch.compile(objective, backend=inductor(MODES[mode]), dynamic=dynamic)


def worth_compiling_for(varying: Varying) -> bool:
    """Whether dimensions beyond the first vary; the first does in the last batch of an epoch."""
    return any(dim for _, dim in varying)


def form_for(batch: Any, varying: Varying) -> Hashable | None:
    """The form of a batch that a compilation depends on; None where it cannot be compared."""
    form = signature(batch)
    return form if form is None or not varying else form_of(batch, varying)
