"""Activation checkpointing of the blocks that a model repeats, or of the modules that a plan names."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from hotloop._torch import buffers_of
from hotloop.levers.base import Lever, LeverTarget, Undo, replace_forward
from hotloop.plan import Plan
from hotloop.values.rng import RngStates
from hotloop.values.snapshot import Snapshot

_HOST = torch.device("cpu")


class CheckpointingLever(Lever):
    """**What it does.** The backward pass needs the activations of the forward pass. With activation checkpointing,
    each block keeps only its input and runs its forward again in the backward pass. That costs about one more forward
    pass and saves most of the memory of activations, which may let a batch fit.

    **The numbers.** Tier A: the gradients are the same, and dropout draws the same masks again. hotloop restores the
    buffers of a block after its second forward, so BatchNorm's running statistics count each batch once.

    **What it needs.** Blocks that the model repeats: items of one class in a `ModuleList` or `Sequential`, each with
    layers inside, as in a transformer or a ResNet. For a model without any, a plan with it is an error.

    **What it costs.** Nothing to pull; time in every step.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", checkpointing=True))
    ```

    The tuner looks for speed, so it never pulls this lever.

    **When it does not help.** If the step fits without it.
    """

    name = "checkpointing"
    order = 160
    tier = "A"
    what = "activation checkpointing of the repeated blocks"
    cost = "nothing"
    undo = "the blocks are unwrapped"
    sets = "checkpointing", True

    def acts(self, plan: Plan) -> bool:
        return plan.checkpointing or bool(plan.recompute)

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        return "it saves memory and costs time, and the step fits without it"

    def impossible(self, target: LeverTarget, plan: Plan) -> str | None:
        if repeated_blocks(target.model):
            return None
        return "the model repeats no block that could be checkpointed"

    def apply(self, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> Iterator[Undo]:
        known = dict(model.named_modules())
        named = [known[name] for name in plan.recompute if name in known]
        for block in repeated_blocks(model) if plan.checkpointing else named:
            contexts = partial(_contexts, block)
            yield replace_forward(block, checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that a deep model repeats: the items of a list or sequence that are of one class and not layers."""
    blocks: list[nn.Module] = []
    for holder in model.modules():
        if isinstance(holder, nn.ModuleList | nn.Sequential):
            inner = [child for child in holder if any(True for _ in child.children())]
            if len(inner) > 1 and len({type(child) for child in inner}) == 1:
                blocks += inner
    blocks = list(dict.fromkeys(blocks))
    held = {id(m) for block in blocks for m in block.modules() if m is not block}
    return [block for block in blocks if id(block) not in held]  # a block inside a block is checkpointed with it


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For the first forward, and for the second, which draws the same numbers and leaves no trace."""
    states: list[RngStates] = []
    return _first_forward(states), _second_forward(block, states)


@contextmanager
def _first_forward(states: list[RngStates]) -> Iterator[None]:
    states.append(RngStates(_HOST))  # PyTorch itself looks after its own generators, and not after the others
    yield


@contextmanager
def _second_forward(block: nn.Module, states: list[RngStates]) -> Iterator[None]:
    """Buffers stay as they are, such as running means."""
    tables = [table for inner in block.modules() if (table := buffers_of(inner))]
    before, now = Snapshot().items(tables).values(block.buffers()), RngStates(_HOST)
    states[0].restore()
    try:
        yield
    finally:
        now.restore()
        before.restore()
