"""The forward and backward pass are compiled by `torch.compile`."""

from dataclasses import replace

from hotloop.levers.base import Lever, LeverTarget
from hotloop.plan import Plan


class CompileLever(Lever):
    """**What it does.** `torch.compile` turns the objective, the model with its loss, and its backward pass into fewer,
    larger kernels. What lay between them is no longer written to memory and read again.

    **The numbers.** Tier B: fused kernels round in other places, and dropout draws other masks from the same seed. Only
    batches of the first one's form are compiled; the tail of an epoch runs eagerly.

    **What it needs.** A CUDA device or a CPU, with what the compiler needs there (Triton, a C++ compiler), no hooks on
    the model, and an objective that uses the model that it is handed.

    **What it costs.** A compilation, from seconds to minutes, for which training waits: 10 seconds are expected, and a
    quarter of one for each layer. Unasked it is tried only where that is at most 3% of the rest of the run, by
    `loop.tune` where it is at most a third. A run of unknown length is not compiled. The time is not part of
    [the budget](../tuning.md#the-budget).

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", compile="default"))
    ```

    **How it is undone.** The compiled function is dropped; the model itself was never wrapped. Where the compiler fails
    in a trial, the lever is dropped with its message.

    **When it does not help.** In short runs. Where the step is one large matmul after another. Where the model branches
    on its data.

    Measured by hand on an H200, on top of bf16: a small CNN from 386,000 to 572,000 images per second, ResNet-18 from
    53,000 to 67,300, a GPT of 124M parameters from 361,000 to 444,000 tokens per second.
    """

    name = "compile"
    order = 140
    tier = "B"
    what = "the forward and backward pass are fused into fewer kernels"
    cost = "a compilation"
    undo = "the compiled function is dropped"

    def pull(self, plan: Plan) -> Plan:
        return replace(plan, compile="default" if plan.compile == "off" else plan.compile, flipped=False)

    def off(self, plan: Plan) -> Plan:
        return replace(plan, compile="off")

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if target.device.type not in ("cuda", "cpu"):
            return f"it is not tried on {target.device.type}"
        return target.why_hooks_are_lost("a compiled step")


class MaxAutotuneLever(Lever):
    """**What it does.** [Compilation](compile.md) with `mode="max-autotune-no-cudagraphs"`: for matmuls the compiler
    also tries kernels of its own beside those of the libraries, and keeps the fastest. (hotloop captures CUDA graphs
    itself, of whole steps.)

    **The numbers.** Tier B, as with `compile`. Which kernel wins may differ from run to run.

    **What it needs.** A CUDA device, and `compile` kept before it. It is tried by `loop.tune` and `hotloop tune` only:
    `fit` and `batches` do not try it by themselves.

    **What it costs.** A long compilation: the tuner expects eight times that of `compile`, and a gain of 5% in speed.
    So it is tried only for long runs.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", compile="max-autotune"))
    ```

    **How it is undone.** The compiled function is dropped.

    **When it does not help.** Where the kernels of the libraries are the best already, which for large matmuls is
    common. In most runs: it has to win back minutes.
    """

    name = "max-autotune"
    order = 150
    tier = "B"
    what = "a compilation that also tries kernels for the matmuls"
    cost = "a long compilation"
    undo = "the compiled function is dropped"
    needs_cuda = True

    def pull(self, plan: Plan) -> Plan:
        return replace(plan, compile="max-autotune", flipped=False)

    def off(self, plan: Plan) -> Plan:
        return replace(plan, compile="off") if plan.compile == "max-autotune" else plan

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if target.without_cuda:
            return target.without_cuda
        return None if plan.compile == "default" else "the plain compilation was not kept"
