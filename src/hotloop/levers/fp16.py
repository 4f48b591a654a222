"""The forward and backward pass compute in float16, with a `GradScaler`."""

from hotloop.device.backend import backend_of
from hotloop.levers.base import Lever, LeverTarget
from hotloop.plan import Plan


class Fp16Lever(Lever):
    """**What it does.** Does the same as [bf16](bf16.md) in float16, for GPUs without bf16 arithmetic. Small gradients
    would underflow in float16, so a `GradScaler` scales the loss up before the backward pass and the gradient down
    after it.

    **The numbers.** Tier B: 10 bits of mantissa, but nothing above 65,504. If a gradient overflows, that update is
    skipped, the scale backs off, and `loop.skipped` counts it. A skipped update does not advance the scheduler.

    **What it needs.** A CUDA GPU. `loop.tune` and `hotloop tune` try it with `precision="auto"`, the default, on those
    of compute capability 7.x: older ones are not fast at it, newer ones have bf16. `fit` does not: ask for it with
    `precision="fp16"`.

    **What it costs.** Nothing to pull. The scaler reads a number from the device in each update, so the host
    synchronizes there, and the step cannot be captured as a [graph](graph.md). The tuner tries the graph first; if it
    keeps the graph, it drops fp16.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", precision="fp16"))
    ```

    **When it does not help.** On GPUs with bf16, which is as fast and needs no scaler. On small models, where the
    synchronization costs more than the arithmetic gives.
    """

    name = "fp16"
    order = 80
    tier = "B"
    what = "forward and backward pass run in float16 autocast, with a GradScaler"
    cost = "nothing"
    undo = "autocast stays off"
    halves_precision = True
    sets = "precision", "fp16"

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if target.pinned_precision:
            return f"precision={plan.precision!r} was asked for"
        if target.without_cuda:
            return target.without_cuda
        fast = backend_of(target.device).half_precision()
        if fast == "bf16":
            return "the GPU has bf16, which is as fast and needs no scaler"
        return None if fast == "fp16" else "the GPU has no fast fp16 arithmetic"
