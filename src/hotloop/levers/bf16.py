"""The forward and backward pass compute in bfloat16."""

import torch

from hotloop import kernels
from hotloop._torch import has_amx
from hotloop.device.backend import backend_of
from hotloop.levers.base import DENSE, HEAVY, Lever, LeverRule, LeverTarget
from hotloop.plan import Plan


class Bf16Lever(Lever):
    """**What it does.** Runs the forward pass under `torch.autocast` in bfloat16; the backward pass follows. Matmuls
    and convolutions move half the bytes and run on faster units. Operations that need more digits, such as a softmax or
    a loss, stay in fp32.

    **The numbers.** Tier B: bfloat16 has 7 bits of mantissa and the range of fp32. Weights, their gradients and the
    optimizer's state stay in fp32. hotloop keeps it only if the loss and the gradient pass [the
    gate](../tuning.md#the-gate-for-tier-b).

    **What it needs.** A GPU of compute capability 8.0 or newer, or a CPU with AMX, and `precision="auto"`, the default:
    the run begins in fp32, and the tuner may switch to bf16. A precision that you asked for stays, `"fp32"` included.

    **What it costs.** Nothing to pull.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", precision="bf16"))
    ```

    `Loop(..., precision="bf16")` without a plan fixes the precision; hotloop still tunes the other levers.

    `loop.evaluate` uses the precision of the plan too.

    **When it does not help.** If launches or the loader take the time. A CPU without AMX emulates bf16 and can be far
    slower.


    """

    name = "bf16"
    order = 70
    tier = "B"
    what = "forward and backward pass run in bfloat16 autocast"
    cost = "nothing"
    undo = "autocast stays off"
    halves_precision = True
    trust = 5
    sets = "precision", "bf16"
    rule = LeverRule(
        f"a step computes more than {HEAVY / 1e9:.0f} GFLOP in matmuls, convolutions and recurrences; if it cannot"
        f" be captured on a GPU, also more than {DENSE / 1e12:.0f} TFLOP per second",
        lambda facts: facts.is_heavy,
        "H200: a GPT of 124M parameters went from 54,200 to 348,000 tokens/s; for an MLP of 64 rows the casts cost"
        " more, and a GRU over packed sequences took 1.26 times as long",
    )

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if target.pinned_precision:
            return f"precision={plan.precision!r} was asked for"
        if target.on_cuda:
            able = _computes_in_bf16(target.device)
            return None if able else "the GPU has no bf16 arithmetic (it came with compute capability 8.0)"
        if backend_of(target.device).is_host:
            return None if has_amx() else "this CPU would emulate bf16 and be slower"
        return f"it is not tried on {target.device.type}"

    def prepare(self, target: LeverTarget) -> None:
        if target.on_cuda and not target.pinned_precision and _computes_in_bf16(target.device):
            kernels.preload.load_beside(target.device, kernels.preload.bf16_matmuls)


def _computes_in_bf16(gpu: torch.device) -> bool:
    return backend_of(gpu).half_precision() == "bf16"
