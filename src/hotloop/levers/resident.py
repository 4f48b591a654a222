"""The data of a run is kept on the device."""

from hotloop.levers.base import Lever, LeverRule, LeverTarget
from hotloop.plan import Plan


class ResidentLever(Lever):
    """**What it does.** Copies all items to the device once and gathers each batch there. A step then copies only the
    indices of its items: nothing is collated on the host, and no data crosses the bus.

    **The numbers.** Tier A: the batches are exactly those of the DataLoader, in its order, from its sampler and its
    generator, and the rng state afterwards is the same.

    **What it needs.** A plain `DataLoader`, in order, with the default `collate_fn`, over items that are always the
    same tensors: a `TensorDataset`, a `Subset` of one, a `ConcatDataset` of these whose items have one shape and type,
    or a dataset with `resident = True`. On a GPU, all of it must fit into half of the free memory.

    **When the data changes.** hotloop sees a write that PyTorch counts (`tensor[3] = 0`), and one that it does not
    count (through NumPy or `.data`), by the next epoch at the latest, and copies the data again. It compares tensors
    and arrays of up to 512 KiB as a whole, larger ones in 1,024 places of 256 bytes spread over them, which takes a few
    tenths of a millisecond. So it may miss a change of a few rows among many thousands, and a write to a tensor already
    on a GPU that bypasses PyTorch's counter. `resident = True` is a promise: of such a dataset, hotloop checks tensors
    and arrays among its attributes, and nothing else. Indices of a `Subset` that are changed in place
    (`part.indices[3] = 7`) count from the next batch on, with workers from the next epoch on, as with the loader.

    **What it costs.** One copy of the dataset, and the memory for it.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", stream="resident"))
    ```

    A loader whose data cannot live on the device is then an error that gives the reason. `stream="auto"`, the default,
    uses it if it can and continues without it otherwise.

    **When it does not help.** If a step takes much longer than loading its batch. A dataset that augments at random is
    never kept on the device: augment there instead, with `device_transform=`.
    """

    name = "resident"
    order = 10
    tier = "A"
    what = "the data lives on the device"
    cost = "a moment"
    undo = "the loader is read again"
    sets = "stream", "resident"
    harmless_above = 0.97  # it changes nothing and costs nothing but memory that is free
    rule = LeverRule(
        "every item is always the same tensor, and all of them fit",
        lambda facts: True,
        "H200: a small CNN went from 37,700 to 79,000 images/s, an MLP from 8,700 to 60,000 rows/s",
    )

    def in_words(self, plan: Plan) -> str:
        return "batches gathered from one tensor" if plan.device == "cpu" else "data on the device"

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        return target.why_not_resident
