"""`CompiledObjective`: an objective that its first call compiles; and how long a compilation is expected to take."""

import hashlib
import json
import warnings
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hotloop._torch import compiler_cache, inductor
from hotloop.device.backend import backend_of
from hotloop.errors import OutputError, PlanWarning
from hotloop.levers.checkpointing import repeated_blocks
from hotloop.levers.compile import Varying, form_of, mark_varying, sizes_of, varying_between
from hotloop.objective.objectives import Objective
from hotloop.plan import Plan
from hotloop.records.cache import cache_folder, make_private
from hotloop.records.files import write_json
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


# How long it takes


@dataclass(frozen=True)
class Estimate:
    """Expected seconds of a compilation, and the evidence."""

    seconds: float
    evidence: str


def expected_seconds(model: nn.Module, mode: str, key: str | None = None) -> Estimate:
    """The expected time of a compilation; `key`, of `key_of`, finds an earlier one on this machine."""
    if key is not None and (before := _remembered(key)) is not None:
        return Estimate(before, "by the time that it took before on this machine, where PyTorch has cached it")
    blocks = repeated_blocks(model)[:1] if mode == "blocks" else []
    layers = sum(not any(True for _ in m.children()) for root in blocks or [model] for m in root.modules())
    seconds = 15.0 + 0.35 * layers
    if mode == "max-autotune":
        return Estimate(8 * seconds, "eight times that of the usual mode, as seen on an H200")
    what = "a block" if blocks else "the model"
    return Estimate(seconds, f"by the {layers} layers of {what}, as seen on an H200 with nothing cached")


def key_of(model: nn.Module, batch: Any, plan: Plan) -> str:
    """A key of what a compilation depends on: the model's class and weights, the batch, the plan."""
    weights = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    where = backend_of(plan.device).device_name()
    told = (torch.__version__, where, type(model).__qualname__, weights, str(form_of(batch)))
    settings = (plan.compile, plan.precision, plan.channels_last, plan.tf32)
    return hashlib.sha256(repr((told, settings)).encode()).hexdigest()[:32]


def _remembered(key: str) -> float | None:
    """Expected seconds of a compilation that PyTorch has cached; None where it has not."""
    with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):  # nobody may know where home is
        told = json.loads((cache_folder("compiled") / f"{key}.json").read_text())
        if any(Path(told["folder"]).iterdir()):
            return float(told["seconds"])
    return None


def remember_seconds(key: str, seconds: float) -> None:
    """Note how long a compilation took, which PyTorch has cached."""
    again = seconds if _remembered(key) is not None else min(seconds, IMPORTS + CACHED_SHARE * seconds)
    with suppress(OSError, OutputError, RuntimeError):  # without it, the next run takes it for a new one
        folder = cache_folder("compiled")
        make_private(folder)
        write_json(folder / f"{key}.json", {"seconds": again, "folder": compiler_cache()}, mode=0o600)
