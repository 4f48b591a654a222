"""What lies between convolutions is computed by hotloop's own kernels, in one pass over memory."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from hotloop.kernels import fuse, layers_to_fuse, prepare, why_no_kernels
from hotloop.levers.base import Lever, LeverRule, LeverTarget, Undo, replace_forward
from hotloop.plan import Plan


class KernelsLever(Lever):
    """**What it does.** Once convolutions run on tensor cores, most of a step goes into what lies between them: each
    `BatchNorm2d`, `GroupNorm`, bias, activation, sum and `MaxPool2d` reads all activations from memory and writes them
    again, and PyTorch's kernels for bf16 with channels together are far from the memory's speed. With this lever a
    layer's output is not computed at once. What comes after it (ReLU, leaky ReLU, GELU or SiLU; a residual, or a number
    for each image and channel, that is added; the largest of windows that do not overlap) becomes part of the same
    kernel, as modules or as functions, in whatever order your `forward` calls them. Whatever else uses the output gets
    an ordinary tensor.

    **The numbers.** Tier B: between normalisation, activation and sum nothing is rounded to two bytes, and sums are
    made in another order, which is always the same one: two runs give the same bits. Pooling alone is PyTorch's to the
    bit. A convolution's bias before a `BatchNorm2d` is left out, since the normalisation takes it away again; its
    gradient is zero, where PyTorch's is rounding noise. A `GroupNorm` gives bf16 or fp16, rounded once after its
    activation, where autocast gives fp32.

    **What it needs.** An NVIDIA GPU of compute capability 8.0 or later, bf16 or fp16, channels_last, and channels in
    multiples of 8. It is proposed where the step is captured as a CUDA graph: from Python a kernel of hotloop's takes
    longer to launch than one of PyTorch's. Layers of derived classes, in evaluation, in other formats or under
    activation checkpointing compute as before. A second derivative (a gradient penalty) and an autograd Function of
    your own that takes a layer's output directly end in an error; the tuner drops the lever then, with the reason.

    **What it costs.** Less than half a second, once: the kernels are compiled by NVRTC, which comes with PyTorch, in
    processes beside one another, and kept in hotloop's cache.

    **By hand.**

    ```python
    plan = hotloop.Plan("cuda", precision="bf16", channels_last=True, graph=1, levers=("kernels",))
    loop = hotloop.Loop(model, optimizer, loss, plan=plan)
    ```

    **How it is undone.** The layers get their own `forward` back.

    **When it does not help.** Where convolutions take nearly all of the step. Where the model is compiled: then the
    compiler does the same, and this lever does nothing.
    """

    name = "kernels"
    order = 105
    tier = "B"
    what = "normalisation, bias, activation, sum and pooling between convolutions are one kernel each way"
    cost = "a moment"
    undo = "the layers compute as before"
    needs_cuda = True
    for_captures = True
    rule = LeverRule(
        "the step is in half precision with channels together, and batches or images are normalised or pooled",
        lambda facts: facts.is_heavy,
        "H200 in bf16, a captured step: small CNN 0.40 ms instead of 0.85, ResNet-18 at 32² 3.87 instead of 4.90,"
        " airbench's network 2.76 instead of 4.12, a UNet with GroupNorm 13.1 instead of 31.3 with channels apart",
    )

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if why := target.why_no_own_kernels(plan):
            return why
        if not plan.channels_last:
            return "the channels of a pixel do not lie together"
        if not _is_worth_it(target.model):
            return "the model has no BatchNorm2d, GroupNorm or MaxPool2d that suits"
        return why_no_kernels(target.device)  # the last, since it loads the compiler

    def impossible(self, target: LeverTarget, plan: Plan) -> str | None:
        return why_no_kernels(target.device)

    def acts(self, plan: Plan) -> bool:
        return self.is_pulled(plan) and plan.compile == "off"

    def prepare(self, target: LeverTarget) -> None:
        if target.on_cuda and _is_worth_it(target.model) and not why_no_kernels(target.device):
            prepare(target.model, target.device, torch.bfloat16)

    def apply(self, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> Iterator[Undo]:
        for layer, forward in fuse(model):
            yield replace_forward(layer, forward)


def _is_worth_it(model: nn.Module) -> bool:
    return any(isinstance(layer, nn.BatchNorm2d | nn.GroupNorm | nn.MaxPool2d) for layer in layers_to_fuse(model))
