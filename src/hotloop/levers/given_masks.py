"""PyTorch's transformers take the masks that they are given, and do not ask the device what is in them."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.levers.base import Lever, LeverRule, LeverTarget, Undo, replace_forward
from hotloop.plan import Plan

# What each is told whether its mask is a causal one, and the place of that among its arguments.
_TOLD: dict[type[nn.Module], tuple[str, int]] = {
    nn.TransformerEncoder: ("is_causal", 3),
    nn.TransformerDecoder: ("tgt_is_causal", 6),
}


class GivenMasksLever(Lever):
    """**What it does.** `nn.TransformerEncoder` and `nn.TransformerDecoder`, and `nn.Transformer`, which is made of
    both, compare a given mask with the causal one, since attention needs no mask then. The comparison synchronizes in
    every forward pass, and a step that synchronizes cannot be captured as a CUDA graph. This lever passes
    `is_causal=False`, as you may do yourself, and attention uses the mask it is given.

    **The numbers.** Tier B: attention may use another kernel, which adds in another order.

    **What it needs.** A CUDA device, one of these two layers, and a call that does not set `is_causal`.

    **What it costs.** Nothing to pull. Attention reads the mask, which costs little beside the synchronization.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", levers=("given masks",)))
    ```

    **When it does not help.** If causal attention over long sequences takes most of the step: pass `is_causal=True`
    there, which avoids the comparison too.
    """

    name = "given masks"
    order = 78
    tier = "B"
    what = "transformer layers use their masks without comparing them on the device"
    cost = "nothing"
    undo = "the layers' `forward` is restored"
    needs_cuda = True
    spares_mask_checks = True
    rule = LeverRule(
        "the model has `nn.TransformerEncoder` or `nn.TransformerDecoder`",
        lambda facts: True,
        "H200: with it `nn.Transformer` is captured; a run of 5 s took 2.2 s instead of 5.5",
    )

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if why := target.why_no_other_forward:
            return why
        return None if any(_comparing(target.model)) else "the model has no layer that compares masks"

    def apply(self, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> Iterator[Undo]:
        for layer in list(_comparing(model)):
            yield replace_forward(layer, _forward, layer)


def _comparing(model: nn.Module) -> Iterator[nn.Module]:
    """The layers that compare a mask with the causal one, as PyTorch wrote them."""
    return (layer for layer in model.modules() if type(layer) in _TOLD and "forward" not in vars(layer))


def _forward(layer: Any, *args: Any, **named: Any) -> Tensor:
    name, place = _TOLD[type(layer)]
    if len(args) > place:
        args = (*args[:place], bool(args[place]), *args[place + 1 :])
    else:
        named[name] = bool(named.get(name))
    output: Tensor = type(layer).forward(layer, *args, **named)
    return output
