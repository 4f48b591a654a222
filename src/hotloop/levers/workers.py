"""Worker processes load batches ahead."""

from dataclasses import replace

from hotloop.levers.base import Lever
from hotloop.plan import Plan
from hotloop.printing.text import plural


class WorkersLever(Lever):
    """**What it does.** Reads the loader through a twin with that many worker processes. They fetch and collate batches
    while the loop trains, which pays if an item takes time to make: decoding, resizing, augmenting.

    **The numbers.** Tier C: the sampler draws the same order, but a dataset's random numbers come from the rng states
    of the workers. Augmentation differs from that of a run without them, so the tuner gives no workers to a loader that
    has none. A loader that has some gets more if the loop waits for it ([data](../tuning.md#data)). Items that are not
    random are the same.

    **What it needs.** A plain `DataLoader` whose dataset can be sent to another process. With resident data nothing
    reads the loader, and no workers start.

    **What it costs.** Starting the processes, mostly once: they stay for the epochs after the first and begin each one
    with the seeds and the dataset that new ones would have (see [how batches get there](../loop.md#workers)). Batches
    in flight take `workers` × `prefetch_factor` × the size of a batch in shared memory.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", workers=4))
    ```

    `workers=None`, the default, leaves it to the loader; `workers=0` takes the loader's workers away.

    **When it does not help.** If items are cheap. Measured by hand on an H200, an epoch of a small MLP over 1,024 rows
    took the tutorial's loop 0.134 s with two workers and 0.036 s without.
    """

    name = "workers"
    order = 40
    tier = "C"
    what = "worker processes load batches ahead; random augmentation differs"
    cost = "a moment"
    undo = "the loader is read as it is"
    adds_workers = True

    def in_words(self, plan: Plan) -> str:
        return "" if plan.stream == "resident" else plural(plan.workers or 0, "worker")

    def pull(self, plan: Plan) -> Plan:
        return replace(plan, workers=plan.workers or 4)

    def off(self, plan: Plan) -> Plan:
        return replace(plan, workers=None) if plan.workers else plan
