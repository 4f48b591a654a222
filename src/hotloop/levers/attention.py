"""Attention is computed without cuDNN, which prepares itself for each shape."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hotloop.levers.base import Lever, LeverRule, LeverTarget
from hotloop.plan import Plan

LONG_RUN = 300.0  # seconds of a run in which cuDNN wins back its preparation


class NoCudnnAttentionLever(Lever):
    """**What it does.** `scaled_dot_product_attention` has several kernels. In half precision on recent GPUs, PyTorch
    prefers the one of cuDNN, which builds a plan for every new shape: half a second and more for each. This lever turns
    it off, so PyTorch uses the flash or the memory-efficient kernel, which takes any shape at once.

    **The numbers.** Tier B: another kernel, which adds in another order and draws other dropout masks.

    **What it needs.** A CUDA device.

    **What it costs.** Nothing to pull. For long sequences of fixed shapes, cuDNN is faster once its
    plan is built.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", levers=("no cudnn attention",)))
    ```

    **When it does not help.** In long runs over fixed shapes.
    """

    name = "no cudnn attention"
    order = 75
    tier = "B"
    what = "attention uses the flash or memory-efficient kernel, not cuDNN's"
    cost = "nothing"
    undo = "the switch is restored after each step"
    needs_cuda = True
    rule = LeverRule(
        f"the model uses attention, and shapes vary from batch to batch or the run takes less than {LONG_RUN:.0f} s",
        lambda facts: facts.attends and (facts.shapes_vary or (facts.left is not None and facts.left < LONG_RUN)),
        "H200: in the first steps of BERT on texts of many lengths in bf16, each new length took 1.5 s",
    )

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        return None if torch.backends.cuda.cudnn_sdp_enabled() else "cuDNN is not used for attention"

    def around(self, plan: Plan) -> AbstractContextManager[Any]:
        return _without_cudnn()


@contextmanager
def _without_cudnn() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
