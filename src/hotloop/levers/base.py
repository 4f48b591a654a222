"""`Lever`: a named change of a plan, with what it needs, how it is applied and reverted, and its documentation."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hotloop._torch import gradient_hooks, has_compiled_parts, module_hooks
from hotloop.device.backend import backend_of
from hotloop.errors import BadArgument
from hotloop.plan import Plan, Tier
from hotloop.printing.text import shorten

Cost = Literal["nothing", "a moment", "a compilation", "a long compilation"]
Undo = Callable[[], object]
UNCAPTURED = "the step is not captured, and from Python these kernels take longer to launch than PyTorch's"
HEAVY = 2e9  # flops of a step from which on faster arithmetic saves more than its casts cost
MANY_ROWS = 1024  # of a batch
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
DENSE = 2e12  # flops in a second, the same for a step whose kernels the host launches one by one


@dataclass(frozen=True)
class LeverTarget:
    """The device, model, optimizers and data that a lever is pulled on."""

    device: torch.device
    model: nn.Module
    optimizers: Sequence[Optimizer]
    pinned_precision: bool = False  # the person asked for this precision
    why_not_resident: str | None = None
    loader_pins: bool = False  # batches come in pinned memory already
    stays_in_place: str | None = None  # why the weights must lie in memory as they do
    only: str | None = None  # why nothing but tier A, and what a run begins with, may be pulled
    on_ranks: bool = False  # whether several processes train together, and average their gradients in each step

    @property
    def on_cuda(self) -> bool:
        return backend_of(self.device).can_capture

    @property
    def without_cuda(self) -> str | None:
        """Why a lever that needs CUDA cannot work here; None where it can."""
        return None if self.on_cuda else f"it needs a CUDA device, and this is {self.device.type}"

    @property
    def may_be_heavy(self) -> bool:
        """Whether a step may compute enough for faster arithmetic to matter, as far as the layers tell.

        Each weight counts for every row, in three matmuls; that of a convolution for every pixel.
        """
        weights = sum(parameter.numel() for parameter in self.model.parameters() if not is_lazy(parameter))
        convolves = any(isinstance(layer, CONVOLUTIONS) for layer in self.model.modules())
        return convolves or 6 * weights * MANY_ROWS >= HEAVY

    @property
    def why_no_other_forward(self) -> str | None:
        """Why `forward` of layers cannot be replaced; None where it can."""
        compiled = "part of the model is compiled already, and would be recompiled"
        return compiled if has_compiled_parts(self.model) else None

    def why_no_own_kernels(self, plan: Plan) -> str | None:
        """Why a plan cannot use hotloop's own kernels; None where it can."""
        if plan.precision == "fp32":
            return "the step is in fp32"
        if not plan.graph:
            return UNCAPTURED
        if plan.compile != "off":
            return "the model is compiled, and the compiler does the same"
        return self.why_no_other_forward

    def why_hooks_are_lost(self, what: str) -> str | None:
        """The modules and parameters whose hooks would not run, in words; None where there are none."""
        hooked = [name or type(each).__name__ for name, each in self.model.named_modules() if module_hooks(each)]
        hooked += [name for name, parameter in self.model.named_parameters() if gradient_hooks(parameter)]
        return f"{shorten(hooked, 3)} has hooks, which {what} would skip" if hooked else None


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run after its first steps."""

    target: LeverTarget
    flops: float  # of the matmuls, convolutions and recurrences of a forward and backward pass
    step: float  # seconds of an eager step in fp32, data included
    left: float | None = None  # seconds that the rest of the run would take in such steps; None where nobody knows
    operations: int = 0  # of such a pass, as PyTorch dispatches them; 0 where nobody has counted
    attends: bool = False  # whether it calls `scaled_dot_product_attention`
    row_sums: int = 0  # how often it normalises rows, or adds a bias to them
    has_room: bool = True  # whether the device has memory for a second set of activations
    shapes_vary: bool = False  # from batch to batch, beyond a smaller last one
    can_be_several: bool = False  # whether steps can be captured together: `fit` owns the loop, the data is resident
    is_launched: bool = False  # kernel by kernel on a GPU, since the step cannot be captured

    @property
    def steps_left(self) -> float:
        """Steps that remain of the run; infinity where unknown."""
        return math.inf if self.left is None else self.left / max(self.step, 1e-9)

    @property
    def is_heavy(self) -> bool:
        """Whether a step computes enough for faster arithmetic to matter, and is not bound by launches."""
        return self.flops >= HEAVY and not (self.is_launched and self.flops < DENSE * self.step)


@dataclass(frozen=True)
class LeverRule:
    """When a lever belongs in the first plan of a run, without measuring, and the evidence for that."""

    when: str
    holds: Callable[[RunFacts], bool]
    evidence: str  # what was measured, and where


@dataclass(frozen=True)
class Delay:
    """For how long a lever holds up a training that is under way."""

    what: str  # such as "a compilation"
    seconds: float
    evidence: str = ""
    key: str | None = None  # under which the measured time is remembered


class Lever:
    """One change of a plan. `tier` A leaves the numbers as they are, B changes their rounding, C the training.

    A lever is a subclass in a file of this folder, and its docstring is its page of the documentation. `sets` is the
    field of `Plan` that it changes; one without a field of its own is listed by name in `Plan.levers`.
    """

    name: str
    order: int  # of trying: first what makes the others measurable, last what costs most to pull
    tier: Tier
    what: str
    cost: Cost
    undo: str
    rule: LeverRule | None = None  # when the tuner proposes it for a run; None: `loop.tune` alone tries it
    begins_on: tuple[str, ...] = ()  # types of devices on which a run has it from its first step
    sets: tuple[str, Any] | None = None  # the setting of `Plan` that it changes, and to what
    needs_cuda = False
    changes_gradients = True  # where its tier is B; else only the update rounds differently, and the gate sees nothing
    computes_the_same = False  # other code for the same numbers: its gradient must be the eager one, at each parameter
    captures = False  # whether it captures the step as a CUDA graph
    for_short_steps = False  # whether it is pulled once captured steps turn out to be short
    spares_mask_checks = False  # whether layers no longer look on the device at the masks that they are given
    adds_workers = False  # whether it is pulled where a run waits for its loader
    for_captures = False  # whether it makes a step that is not captured slower
    late_above = math.inf  # seconds of a step above which it is tried after all others
    harmless_above = math.inf  # a gain above which it is kept although it is not faster
    is_alone = False  # whether several ranks have it only where a plan asks for it
    is_own_code = False  # whether it has layers or kernels of hotloop's own, the first to drop where the gate fails
    halves_precision = False  # whether layers compute in half precision, the next to drop
    trust = 0  # the least trusted levers are left out first where a plan is slower than the eager loop

    def pull(self, plan: Plan) -> Plan:
        """The plan with this lever; pulling twice changes nothing."""
        if self.sets is None:
            return replace(plan, levers=(*plan.levers, self.name))
        name, value = self.sets
        return replace(plan, **{name: value})

    def off(self, plan: Plan) -> Plan:
        """The plan without this lever."""
        if self.sets is None:
            return replace(plan, levers=tuple(name for name in plan.levers if name != self.name))
        name, value = self.sets
        return replace(plan, **{name: getattr(Plan, name)}) if getattr(plan, name) == value else plan

    @lru_cache(maxsize=1024)  # noqa: B019  # levers are there for good, and a run asks hundreds of times
    def is_pulled(self, plan: Plan) -> bool:
        return self.pull(plan) == plan

    def acts(self, plan: Plan) -> bool:
        """Whether a plan needs this lever applied, be it for a part of its effect."""
        return self.is_pulled(plan)

    def why_not(self, target: LeverTarget, plan: Plan) -> str | None:
        """Why the tuner does not try it; None where it does."""
        if self.is_pulled(plan):
            return "it is pulled already"
        if self.tier == "C":
            return "it changes the training, so it is pulled only if the plan asks for it"
        if self.is_alone and target.on_ranks:
            return "on several ranks it is not tried unasked"
        if self.tier == "B" and target.only and target.device.type not in self.begins_on:
            return target.only
        if self.needs_cuda and target.without_cuda:
            return target.without_cuda
        return self.obstacle(target, plan) or self.impossible(target, plan)

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        """Why it should not be tried here, where it is on the device that it needs; None where it may be."""
        return None

    def impossible(self, target: LeverTarget, plan: Plan) -> str | None:
        """Why it cannot work here even where a person's plan asks for it; None where it can. Asked last."""
        return target.without_cuda if self.needs_cuda else None

    def refines(self, model: nn.Module) -> bool:
        """Whether it is tried once a run has its plan, where the time for which it holds training up pays back."""
        return False

    def delay(self, target: LeverTarget, plan: Plan, batch: Any, *, shapes_vary: bool) -> Delay | str:
        """How long it holds training up there, or why that cannot pay back; batches are like `batch`."""
        raise NotImplementedError

    def prepare(self, target: LeverTarget) -> None:
        """Start slow preparations beside the first steps of a run that may pull it, and may be heavy."""

    def apply(self, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> Iterable[Undo]:
        """Change a model and its optimizers; returns the calls that undo it, to be made in reverse order."""
        return ()

    def around(self, plan: Plan) -> AbstractContextManager[Any] | None:
        """A new context manager for one step; None where the lever needs none."""
        return None

    def inputs(self, batch: Any, plan: Plan) -> Any:
        """The batch in the form that the step takes."""
        return batch

    def in_words(self, plan: Plan) -> str:
        """What it changes of the loop as written, in a person's words; empty where nothing is to be said of it."""
        return self.name

    @property
    def page(self) -> str:
        """The path of its page in the documentation."""
        return f"levers/{self.name.replace(' ', '-')}.md"

    @property
    def documentation(self) -> str:
        """Its page as Markdown: the facts, then the docstring of its class."""
        heads, facts = "| tier | cost to pull | how it is undone |", f"| {self.tier} | {self.cost} | {self.undo} |"
        text = inspect.cleandoc(type(self).__doc__ or "")
        known = f"**When it is proposed.** If {self.rule.when}. {self.rule.evidence}.\n\n" if self.rule else ""
        return f"# {self.name}\n\n{heads}\n|---|---|---|\n{facts}\n\n{known}{text}\n"


class UnknownLever(Lever):
    """A name in `Plan.levers` that no lever has."""

    tier = "C"
    what = "nothing that is known here"
    cost = "nothing"
    undo = "there is nothing to undo"

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self._why = why

    def impossible(self, target: LeverTarget, plan: Plan) -> str | None:
        return self._why

    def apply(self, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> Iterable[Undo]:
        raise BadArgument(f"the plan has {self.name}: {self._why}", fix="leave it out of the plan")


def set_attribute(target: object, name: str, value: object) -> Undo:
    """Set an attribute; returns the call that undoes it."""
    if name not in vars(target):
        setattr(target, name, value)
        return partial(vars(target).pop, name, None)
    before = getattr(target, name)
    setattr(target, name, value)
    return partial(setattr, target, name, before)


class LayerForward(partial[Any]):
    """The `forward` that a lever gives a layer; copies and pickles of the layer get the original."""

    before: tuple[Any, ...]
    plan: Any = None  # the `AppliedPlan` that it belongs to, which lives as long as the layer has it

    def __reduce__(self) -> tuple[Any, ...]:
        if len(self.before) == 1:
            return partial, self.before
        return getattr, (self.before[1], "forward")  # of a copy that has no attributes yet: that of its class

    def take_out(self, layer: nn.Module) -> None:
        """Give a layer its original `forward` again."""
        if len(self.before) == 1:
            vars(layer)["forward"] = self.before[0]
        else:
            del vars(layer)["forward"]


def replace_forward(layer: nn.Module, function: Callable[..., Any], *arguments: Any, **named: Any) -> Undo:
    """Replace `forward` of a layer by a function; returns the call that undoes it."""
    own = LayerForward(function, *arguments, **named)
    own.before = (vars(layer)["forward"],) if "forward" in vars(layer) else (type(layer).forward, layer)
    vars(layer)["forward"] = own
    return lambda: own.take_out(layer) if vars(layer).get("forward") is own else None  # else it was replaced since
