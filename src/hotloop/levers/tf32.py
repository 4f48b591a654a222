"""Matmuls in fp32 run on tensor cores."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hotloop.device.backend import backend_of
from hotloop.levers.base import Lever, LeverRule, LeverTarget
from hotloop.plan import Plan


class Tf32Lever(Lever):
    """**What it does.** Matmuls in fp32 read their inputs with 10 bits of mantissa, so they run on tensor cores. They
    still add in fp32, and nothing else changes. (Convolutions may use TF32 in PyTorch from the start.)

    **The numbers.** Tier B: inputs of matmuls are rounded to the mantissa of fp16, with the range of fp32.

    **What it needs.** A GPU of compute capability 8.0 or newer, and fp32 as the precision of the plan. The tuner leaves
    it alone if you asked for a precision, `precision="fp32"` included, or have set that of matmuls yourself.

    **What it costs.** Nothing.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", tf32=True))
    ```

    **When it does not help.** If bf16 was kept: few matmuls are left in fp32, and it is not tried. If matmuls are a
    small part of the step.


    """

    name = "tf32"
    order = 90
    tier = "B"
    what = "fp32 matmuls read 10 bits of mantissa instead of 23"
    cost = "nothing"
    undo = "the switch is restored after each step"
    trust = 4
    needs_cuda = True
    sets = "tf32", True
    rule = LeverRule(
        "a step has much arithmetic and its matmuls stay in fp32",
        lambda facts: facts.is_heavy,
        "H200: a GPT of 124M parameters went from 54,200 to 157,000 tokens/s",
    )

    def in_words(self, plan: Plan) -> str:
        return "TF32"

    def impossible(self, target: LeverTarget, plan: Plan) -> str | None:
        mixed = "the precision of matmuls was set per backend, which cannot be restored as a whole"
        return super().impossible(target, plan) or (mixed if fp32_matmul_precision() == "mixed" else None)

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if target.pinned_precision:
            return f"precision={plan.precision!r} was asked for"
        if backend_of(target.device).half_precision() != "bf16":  # both came with compute capability 8.0
            return "the GPU has no TF32 arithmetic (it came with compute capability 8.0)"
        if fp32_matmul_precision() != "highest":
            return "the precision of matmuls was set by hand"
        return None if plan.precision == "fp32" else f"the matmuls are in {plan.precision}"

    def around(self, plan: Plan) -> AbstractContextManager[Any]:
        return fp32_matmul("high")


def fp32_matmul_precision() -> str:
    """What PyTorch calls the precision of matmuls in fp32; "mixed" where its parts were set one by one."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "mixed"


@contextmanager
def fp32_matmul(precision: str) -> Iterator[None]:
    """Matmuls in fp32 as precise as said, inside the block."""
    before = torch.get_float32_matmul_precision()
    libraries = [getattr(torch.backends, name).matmul for name in ("cuda", "mkldnn")]
    each = [library.fp32_precision for library in libraries]
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for library, own in zip(libraries, each, strict=True):
            library.fp32_precision = own
