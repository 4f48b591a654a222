"""The step is captured as a CUDA graph, one or several steps at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hotloop._torch import WARNED_UNCAPTURED, is_simulated_gpu, step_hooks
from hotloop.levers.base import Lever, LeverRule, LeverTarget, Undo, set_attribute
from hotloop.levers.flags import set_flags
from hotloop.levers.fused import fuse, without_fused_kernel
from hotloop.plan import Plan

MOST_STEPS = 16  # in one CUDA graph
SHORT = 1.0  # seconds of an eager step; of a longer one, launches are a small part
# Of a pass that takes longer to launch than to compute, even as a graph.
FEW_OPERATIONS, LIGHT_FLOPS = 100, 5e8
MANY_TINY = 500  # steps in which a graph of several pays for its capture
MANY_BATCHES = 300  # of varying shapes, so that some come often: a shape is captured when it comes the tenth time


class GraphLever(Lever):
    """**What it does.** A step of a small model is hundreds of short kernels, and launching one from Python takes
    longer than running it. hotloop captures the whole step (forward, backward and update) once as a CUDA graph; from
    then on one call replays it. [CUDA graphs](../cuda-graphs.md) tells what is captured and when.

    **The numbers.** Tier A: the same operations in the same order. The optimizer runs in its capturable form
    (`capturable=True`; SGD with its fused kernel), which may round its last bits differently: it equals an eager loop
    with the same flags, to the bit.

    **What it needs.** A CUDA device; fp32 or bf16; an optimizer with `capturable`, or SGD; no hooks on the model or the
    optimizer; a step that does the same work every time and never synchronizes; and one process: on several ranks
    there are no CUDA graphs.

    **What it costs.** A moment for the capture. The graph has its own memory pool, of about the peak memory of a step.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", graph=1))
    ```

    If you change what the graph froze, such as modes, `requires_grad` or a number that the model reads, the step is
    [captured again](../cuda-graphs.md#what-is-seen-later-and-what-is-not).

    **When it does not help.** If a step is long: the launches are done before the kernels are. The tuner tries it last
    if a step takes more than 0.1 s.

    Measured by hand on an H200, resident data and a graph per step took an epoch of a small MLP from 0.036 s to
    0.0011 s.
    """

    name = "graph"
    order = 50
    tier = "A"
    what = "the whole step is captured once as a CUDA graph and replayed with one call"
    cost = "a moment"
    undo = "the graph is dropped"
    trust = 7
    needs_cuda = True
    captures = True
    late_above = 0.1  # launches are a small part of a step that takes longer, and the graph would hold much memory
    rule = LeverRule(
        f"an eager step takes less than {SHORT:.0f} s, the device has memory for the graph, and, if shapes vary"
        f" from batch to batch, {MANY_BATCHES} or more batches remain, so that shapes repeat",
        lambda facts: (
            facts.step < SHORT and facts.has_room and (not facts.shapes_vary or facts.steps_left >= MANY_BATCHES)
        ),
        "H200: a small CNN went from 63,900 to 321,000 images/s with its data on the device; BERT on 64 batches of"
        " varying lengths was 1.92 times as fast as the tutorial's loop without a graph and 1.74 with it",
    )

    def in_words(self, plan: Plan) -> str:
        return f"{plan.graph} steps per CUDA graph" if plan.graph > 1 else "CUDA graph"

    def pull(self, plan: Plan) -> Plan:
        return replace(plan, graph=max(plan.graph, 1))

    def off(self, plan: Plan) -> Plan:
        return replace(plan, graph=0)

    def impossible(self, target: LeverTarget, plan: Plan) -> str | None:
        if target.on_ranks:
            return "several ranks exchange gradients in each step, and hotloop captures no step that does"
        if target.without_cuda:
            return target.without_cuda
        if is_simulated_gpu():
            return "a simulated GPU captures nothing"
        if plan.precision == "fp16":
            return "the scaler of fp16 decides on the host whether to update"
        for optimizer in target.optimizers:
            capturable = all("capturable" in group for group in optimizer.param_groups)
            if not capturable and type(optimizer) is not SGD:
                return f"{type(optimizer).__name__} cannot be captured (it has no `capturable`)"
            if not capturable and (why := without_fused_kernel(optimizer)):
                return f"only its fused kernel can be captured, and {why}"
            if any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
                return f"the learning rate of {type(optimizer).__name__} is a tensor; a number is sent to each replay"
            if step_hooks(optimizer):
                return f"{type(optimizer).__name__} has hooks, which a captured step would skip"
        return target.why_hooks_are_lost("a captured step")

    def apply(self, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> Iterator[Undo]:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if "capturable" in group:
                    yield set_flags(group, capturable=True)
                    # The tail of an epoch runs eagerly on purpose: no warning is due.
                    yield set_attribute(optimizer, WARNED_UNCAPTURED, True)
                elif "fused" in group:  # SGD: only its fused kernel reads a learning rate that is on the device
                    yield from fuse(optimizer, group)


class SeveralStepsLever(Lever):
    """**What it does.** With a graph per step, the host still gathers a batch, sends its learning rate and calls the
    replay. For very small models that takes longer than the step. This lever captures up to 16 steps in one graph,
    which gathers its batches from the data on the device. The host only sends the sampler's indices and the learning
    rates, once for all of them.

    **The numbers.** Tier A: the same steps on the same batches with the same learning rates.

    **What it needs.** A [captured](graph.md) step, data that is [resident](resident.md), and `fit`: in a loop of your
    own, `loop.step` takes one batch at a time. A `device_transform` becomes part of the graph. hotloop inspects it
    first; if it draws random numbers on the host or synchronizes, steps are captured one by one, with the transform
    outside.

    **What it costs.** A moment for the capture. Progress, Ctrl-C and the check of the loss come once per replay instead
    of once per step.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", stream="resident", graph=16))
    report = loop.fit(loader, epochs=100)
    ```

    With `accumulate=k` the number is rounded down to whole accumulation windows. Full batches left over at the end of
    an epoch go into a shorter graph; a smaller last one runs by itself.

    If several steps cannot be captured, `fit` captures one at a time.

    **When it does not help.** If a step takes longer than its launch.

    Measured by hand on an H200, an epoch of a small MLP took 0.00109 s with a graph per step and 0.00067 s with one
    graph for the whole epoch.
    """

    name = "several steps"
    order = 60
    tier = "A"
    what = f"up to {MOST_STEPS} steps in one CUDA graph, inside `fit`"
    cost = "a moment"
    undo = "the graph is dropped"
    needs_cuda = True
    for_short_steps = True
    rule = LeverRule(
        f"`fit` owns the loop, a forward and backward pass is fewer than {FEW_OPERATIONS} operations of less than"
        f" {LIGHT_FLOPS / 1e9:.1f} GFLOP in all, and {MANY_TINY} or more steps remain; otherwise the time of captured"
        " steps decides",
        lambda facts: (
            facts.can_be_several
            and 0 < facts.operations < FEW_OPERATIONS
            and facts.flops < LIGHT_FLOPS
            and facts.steps_left >= MANY_TINY
        ),
        "H200: with this rule, and without kernels that it does not need, a run of an MLP with 1,024 rows that takes"
        " the tutorial's loop 10 s took 0.23 s instead of 0.28",
    )

    def in_words(self, plan: Plan) -> str:
        return ""

    def pull(self, plan: Plan) -> Plan:
        return replace(plan, graph=plan.graph if plan.graph > 1 else MOST_STEPS)

    def off(self, plan: Plan) -> Plan:
        return replace(plan, graph=min(plan.graph, 1))

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if plan.graph < 1:
            return "the step is not captured"
        return None if plan.stream == "resident" else "the data does not live on the device"
