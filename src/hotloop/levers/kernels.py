"""What lies between convolutions is computed by hotloop's own kernels, in one pass over memory."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from hotloop import kernels
from hotloop.levers.base import Lever, LeverRule, LeverTarget, Undo, replace_forward
from hotloop.plan import Plan


class KernelsLever(Lever):
    """**What it does.** Once convolutions run on tensor cores, most of a step goes into the operations between them:
    each `BatchNorm2d`, `GroupNorm`, bias, activation, sum and `MaxPool2d` reads all activations from memory and writes
    them again, and PyTorch's kernels for bf16 in channels_last are far from memory bandwidth. This lever defers a
    layer's output: what follows (ReLU, leaky ReLU, GELU or SiLU; the addition of a residual, or of a number for each
    image and channel; max pooling over windows that do not overlap) becomes part of the same kernel, as modules or as
    functions, in whatever order your `forward` calls them. Whatever else uses the output gets an ordinary tensor.

    **The numbers.** Tier B: nothing is rounded to two bytes between normalisation, activation and sum, and sums are
    made in another order, but always the same: two runs give the same bits. Pooling alone equals PyTorch's to the bit.
    A convolution's bias before a `BatchNorm2d` is left out, since the normalisation cancels it; its gradient is zero,
    where PyTorch's is rounding noise. A `GroupNorm` gives bf16 or fp16, rounded once after its activation, where
    autocast gives fp32.

    **What it needs.** An NVIDIA GPU of compute capability 8.0 or later, bf16 or fp16, channels_last, and channels in
    multiples of 8. It is proposed only if the step is captured as a CUDA graph: from Python, hotloop's kernels take
    longer to launch than PyTorch's. Layers of derived classes, in evaluation, in other formats or under activation
    checkpointing compute as before. A second derivative (a gradient penalty), or an autograd Function of your own that
    takes a layer's output directly, is an error; the tuner then drops the lever and gives the reason.

    **What it costs.** Less than half a second, once: NVRTC, which comes with PyTorch, compiles the kernels in parallel
    processes, and hotloop caches them.

    **By hand.**

    ```python
    plan = hotloop.Plan("cuda", precision="bf16", channels_last=True, graph=1, levers=("kernels",))
    loop = hotloop.Loop(model, optimizer, loss, plan=plan)
    ```

    **When it does not help.** If convolutions take nearly all of the step. If the model is compiled: the compiler does
    the same, and this lever does nothing.
    """

    name = "kernels"
    order = 105
    tier = "B"
    what = "normalisation, bias, activation, sum and pooling between convolutions are one kernel each way"
    cost = "a moment"
    undo = "the layers' `forward` is restored"
    is_own_code = True
    trust = 2
    needs_cuda = True
    computes_the_same = True
    for_captures = True
    rule = LeverRule(
        "the step is in half precision and channels_last, and has BatchNorm2d, GroupNorm or MaxPool2d",
        lambda facts: facts.is_heavy,
        "H200 in bf16, a captured step: small CNN 0.40 ms instead of 0.85, ResNet-18 at 32² 3.87 instead of 4.90,"
        " airbench's network 2.76 instead of 4.12, a UNet with GroupNorm 13.1 instead of 31.3 without channels_last",
    )

    def in_words(self, plan: Plan) -> str:
        return "fused kernels" if plan.compile == "off" else ""

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if why := target.why_no_own_kernels(plan):
            return why
        if not plan.channels_last:
            return "the model is not in channels_last"
        return None if _is_worth_it(target.model) else "the model has no BatchNorm2d, GroupNorm or MaxPool2d that suits"

    def impossible(self, target: LeverTarget, plan: Plan) -> str | None:
        return kernels.nvrtc.why_no_kernels(target.device)

    def acts(self, plan: Plan) -> bool:
        return self.is_pulled(plan) and plan.compile == "off"

    def prepare(self, target: LeverTarget) -> None:
        if target.on_cuda and _is_worth_it(target.model) and not kernels.nvrtc.why_no_kernels(target.device):
            kernels.layers.prepare(target.model, target.device, torch.bfloat16)

    def apply(self, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> Iterator[Undo]:
        for layer, forward in kernels.layers.fuse(model):
            yield replace_forward(layer, forward)


def _is_worth_it(model: nn.Module) -> bool:
    return any(
        isinstance(layer, nn.BatchNorm2d | nn.GroupNorm | nn.MaxPool2d)
        for layer in kernels.layers.layers_to_fuse(model)
    )
