"""Batches are copied to the device ahead of the step that needs them, from pinned memory."""

from dataclasses import replace

from hotloop.levers.base import Lever, LeverTarget
from hotloop.plan import Plan


class PinnedMemoryLever(Lever):
    """**What it does.** A GPU can copy from pinned memory by itself, so the host need not stay for the copy. The loader
    is read through a twin with `pin_memory=True`, whose thread does the pinning.

    **The numbers.** Tier A: the same batches.

    **What it needs.** A CUDA device, a plain `DataLoader` that does not pin yet, and data that is not resident. Other
    iterables are read as they are.

    **What it costs.** Nothing to pull. The batches that are under way hold host memory that cannot be swapped out.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", stream="direct", pinned=True))
    ```

    On a device other than CUDA a plan with it is refused. `loop.tune` times it for a plain `DataLoader` with a
    sampler of PyTorch, which it can read again without a trace. `fit` and `batches` do not: ask for it as above.

    **How it is undone.** The loader is read as it is; the one that you hold was never changed.

    **When it does not help.** Where a step waits for the loading itself: pinning is one more copy on the host. Where
    batches are small.
    """

    name = "pinned memory"
    order = 20
    tier = "A"
    what = "the loader's batches lie where the GPU can copy them by itself"
    cost = "nothing"
    undo = "the loader is read as it is"
    needs_cuda = True

    def pull(self, plan: Plan) -> Plan:
        return replace(plan, pinned=True)

    def off(self, plan: Plan) -> Plan:
        return replace(plan, pinned=False)

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if target.loader_pins:
            return "the loader pins its batches already"
        return _why_no_copies(plan) or target.without_cuda


class PrefetchLever(Lever):
    """**What it does.** Two batches are copied ahead on a side stream while the present one computes. The device waits
    for a copy that is not done; the host does not.

    **The numbers.** Tier A: the same batches in the same order.

    **What it needs.** A CUDA device, and data that is not resident. Batches that are not in pinned memory are pinned
    first.

    **What it costs.** Nothing to pull. Memory for two more batches on the device.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", stream="prefetched", pinned=True))
    ```

    With `pinned=True` a thread of the loader does the pinning; without it, the thread that trains does.
    `hotloop.stream(loader, device, "prefetched")` is the same in a loop of your own. `loop.tune` times it under the
    same condition as [pinned memory](pinned-memory.md).

    **How it is undone.** Batches are copied when their turn comes: `stream="direct"`.

    **When it does not help.** It hides the copy, not the loading: where the loader is slow, the step still waits for
    it. Where batches are small, there is nothing to hide.
    """

    name = "prefetch"
    order = 30
    tier = "A"
    what = "the next batches are copied while this one computes"
    cost = "nothing"
    undo = "batches are copied when their turn comes"
    needs_cuda = True

    def pull(self, plan: Plan) -> Plan:
        return replace(plan, stream="prefetched")

    def off(self, plan: Plan) -> Plan:
        return replace(plan, stream="auto") if plan.stream == "prefetched" else plan

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        return _why_no_copies(plan) or target.without_cuda


def _why_no_copies(plan: Plan) -> str | None:
    return "the data lives on the device" if plan.stream == "resident" else None
