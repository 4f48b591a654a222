"""Batches are copied to the device ahead of the step that needs them, from pinned memory."""

from hotloop.levers.base import Lever, LeverTarget
from hotloop.plan import Plan


class PinnedMemoryLever(Lever):
    """**What it does.** A GPU copies from pinned memory by itself, so the copy does not block the host. hotloop reads
    the loader through a twin with `pin_memory=True`, whose thread does the pinning.

    **The numbers.** Tier A: the same batches.

    **What it needs.** A CUDA device, a plain `DataLoader` that does not pin yet, and data that is not resident. Other
    iterables are read as they are.

    **What it costs.** Nothing to pull. Batches in flight hold host memory that cannot be swapped out.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", stream="direct", pinned=True))
    ```

    On a device other than CUDA, a plan with it is an error. `loop.tune` times it for a plain `DataLoader` with a
    PyTorch sampler, which it can read again without side effects. `fit` and `batches` do not: ask for it as above.

    **When it does not help.** If a step waits for the loading itself: pinning is one more copy on the host. If batches
    are small.
    """

    name = "pinned memory"
    order = 20
    tier = "A"
    what = "batches are in pinned memory, so copies do not block the host"
    cost = "nothing"
    undo = "the loader is read as it is"
    needs_cuda = True
    sets = "pinned", True

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if target.loader_pins:
            return "the loader pins its batches already"
        return _why_no_copies(plan)


class PrefetchLever(Lever):
    """**What it does.** Copies two batches ahead on a side stream while the current one computes. The device waits for
    an unfinished copy; the host does not.

    **The numbers.** Tier A: the same batches in the same order.

    **What it needs.** A CUDA device, and data that is not resident. Batches that are not in pinned memory are pinned
    first.

    **What it costs.** Nothing to pull. Memory for two more batches on the device.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", stream="prefetched", pinned=True))
    ```

    With `pinned=True` a thread of the loader does the pinning; without it, the training thread does.
    `hotloop.stream(loader, device, "prefetched")` is the same in a loop of your own. `loop.tune` times it under the
    same condition as [pinned memory](pinned-memory.md).

    **When it does not help.** It hides the copy, not the loading: if the loader is slow, the step still waits for it.
    If batches are small, there is nothing to hide.
    """

    name = "prefetch"
    order = 30
    tier = "A"
    what = "the next batches are copied while this one computes"
    cost = "nothing"
    undo = "each batch is copied when its step needs it"
    needs_cuda = True
    sets = "stream", "prefetched"

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        return _why_no_copies(plan)


def _why_no_copies(plan: Plan) -> str | None:
    return "the data lives on the device" if plan.stream == "resident" else None
