"""The data of a run is kept on the device."""

from dataclasses import replace

from hotloop.levers.base import Lever, LeverRule, LeverTarget
from hotloop.plan import Plan


class ResidentLever(Lever):
    """**What it does.** All items are copied to the device once, and each batch is gathered there. A step then copies
    only the indices of its items: nothing is collated on the host and no data crosses the bus.

    **The numbers.** Tier A: the batches are exactly those of the DataLoader, in its order, from its sampler and its
    generator, and the rng state afterwards is the same.

    **What it needs.** A plain `DataLoader`, in order, with the default `collate_fn`, over items that are always the
    same tensors: a `TensorDataset`, a `Subset` of one, or a dataset with `resident = True`. On a GPU, all of it must
    fit into half of the free memory.

    **When the data changes.** A write that PyTorch counts (`tensor[3] = 0`) is seen by the next epoch at the latest,
    and so is one that it does not count, through NumPy or `.data`; the data is copied again then. Tensors and arrays of
    up to 512 KiB are compared as a whole for that, larger ones in 1,024 places of 256 bytes that are spread over them,
    which takes a few tenths of a millisecond. So a change of a few rows among many thousands may be missed, as is one
    of a tensor that is on a GPU already and goes past PyTorch's counter. `resident = True` is a promise: of such a
    dataset, tensors and arrays among its attributes are looked at, and nothing else.

    **What it costs.** One copy of the dataset, and the memory for it.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", stream="resident"))
    ```

    A loader whose data cannot live on the device is then refused, with the reason. `stream="auto"`, the default, takes
    it where it can and goes on without it elsewhere.

    **How it is undone.** With `stream="direct"` or `plan="plain"` the loader is read again.

    **When it does not help.** Where a step takes much longer than loading its batch. And a dataset that augments at
    random is never kept: augment on the device instead, with `device_transform=`.
    """

    name = "resident"
    order = 10
    tier = "A"
    what = "the data lives on the device"
    cost = "a moment"
    undo = "the loader is read again"
    harmless_above = 0.97  # it changes nothing and costs nothing but memory that is free
    rule = LeverRule(
        "every item is always the same tensor, and all of them fit",
        lambda facts: True,
        "H200: a small CNN went from 37,700 to 79,000 images/s, an MLP from 8,700 to 60,000 rows/s",
    )

    def pull(self, plan: Plan) -> Plan:
        return replace(plan, stream="resident")

    def off(self, plan: Plan) -> Plan:
        return replace(plan, stream="auto") if plan.stream == "resident" else plan

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        return target.why_not_resident
