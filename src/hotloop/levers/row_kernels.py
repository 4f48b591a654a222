"""Layer normalisation, and the gradients of biases, are computed by hotloop's own kernels."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hotloop import kernels
from hotloop.levers.base import Lever, LeverRule, LeverTarget
from hotloop.plan import Plan

MANY_ROW_SUMS = 8  # normalisations and biases: that of a classifier's last layer alone is not worth it


class RowKernelsLever(Lever):
    """**What it does.** Once the matmuls of a transformer run on tensor cores, much of a step goes into sums over all
    rows of a batch: the gradient of each linear layer's bias, and those of each `LayerNorm`'s weight and bias.
    PyTorch's kernels take several times as long for them as memory bandwidth allows. hotloop's kernels run at that
    bandwidth, a `LayerNorm`'s backward pass is one kernel instead of two, and if a linear layer takes its output, the
    kernel writes it in two bytes as well: autocast would make that copy afterwards.

    **The numbers.** Tier B: sums are made in another order, but always the same: two runs give the same bits. The
    gradient of a bias is summed in fp32 and stays in it, where autocast rounds it to two bytes.

    **What it needs.** An NVIDIA GPU of compute capability 8.0 or later, bf16 or fp16, a step captured as a CUDA graph,
    and a model that calls `F.layer_norm` over the last dimension (at most 8,192, a multiple of 8), or `F.linear` or
    `torch.addmm` with a bias (in multiples of 8), from any layer: those of `torch.nn`, of other libraries, your own.
    Calls inside `nn.MultiheadAttention`, and the second forward of activation checkpointing, compute as before. A
    second derivative through a normalisation is an error; the tuner then drops the lever and gives the reason.

    **What it costs.** Less than half a second, once: NVRTC, which comes with PyTorch, compiles the kernels in parallel
    processes, and hotloop caches them.

    **By hand.**

    ```python
    plan = hotloop.Plan("cuda", precision="bf16", graph=1, levers=("row kernels",))
    loop = hotloop.Loop(model, optimizer, loss, plan=plan)
    ```

    **When it does not help.** If matmuls take nearly all of the step, as with wide layers and few rows. If shapes vary,
    so that many steps run eagerly: from Python these kernels take longer to launch than PyTorch's. If the model is
    compiled: the compiler does the same, and this lever does nothing.
    """

    name = "row kernels"
    order = 106
    tier = "B"
    what = "hotloop's own kernels compute layer normalisation and the gradients of biases"
    cost = "a moment"
    undo = "PyTorch's functions are restored after each step"
    is_own_code = True
    trust = 1
    needs_cuda = True
    computes_the_same = True
    for_captures = True
    rule = LeverRule(
        f"the step is in half precision, normalises rows or adds biases {MANY_ROW_SUMS} times or more, and shapes do"
        " not vary from batch to batch",
        lambda facts: facts.is_heavy and facts.row_sums >= MANY_ROW_SUMS and not facts.shapes_vary,
        "H200 in bf16, a captured step: timm's ViT-tiny 9.4 ms instead of 15.0, a GPT without biases 39.2 instead of"
        " 42.0, GPT-2 27.2 instead of 28.1; BERT, eagerly, 77 ms instead of 41",
    )

    def in_words(self, plan: Plan) -> str:
        return self.name if plan.compile == "off" else ""

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if why := target.why_no_own_kernels(plan):
            return why
        return None if _has_vectors(target.model) else "the model has neither biases nor normalisations"

    def impossible(self, target: LeverTarget, plan: Plan) -> str | None:
        return kernels.nvrtc.why_no_kernels(target.device)

    def acts(self, plan: Plan) -> bool:
        return self.is_pulled(plan) and plan.compile == "off"

    def prepare(self, target: LeverTarget) -> None:
        if target.on_cuda and _is_likely(target.model) and not kernels.nvrtc.why_no_kernels(target.device):
            kernels.rows.prepare_rows(target.model, target.device, torch.bfloat16)

    def around(self, plan: Plan) -> AbstractContextManager[Any]:
        return kernels.rows.RowKernels()


def _is_likely(model: nn.Module) -> bool:
    """Whether a model will call these functions, as far as its layers tell."""
    names = [(type(layer).__name__, getattr(layer, "bias", None)) for layer in model.modules()]
    return any("LayerNorm" in name or (bias is not None and name in ("Linear", "Conv1D")) for name, bias in names)


def _has_vectors(model: nn.Module) -> bool:
    """Whether a parameter may be a bias or belong to a normalisation."""
    return any(parameter.dim() == 1 for parameter in model.parameters())
