"""A GPU that is not here: what a training script would do on it, found without one.

The package itself can be called, which makes a block of one's own program run on such a GPU:

>>> with hotloop.simulate("h200") as sim:  # doctest: +SKIP
...     train()
>>> print(sim)  # doctest: +SKIP
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING

import hotloop.terminal  # noqa: F401  # before anything here imports rich

if TYPE_CHECKING:
    from hotloop.simulate.block import SimulationContext
    from hotloop.simulate.cards import Card


class _Simulate(ModuleType):
    """This package, which is named like what it does."""

    def __call__(
        self, gpu: "str | Card" = "h200", *, gpus: int = 1, steps: int | None = None, values: bool = False
    ) -> "SimulationContext":
        """A block in which CUDA tensors are on a simulated GPU; ends after `steps` of the optimizer where given.

        `gpus` are those of the machine. With `values` they are computed on the host as well, so that losses are true
        and so is what depends on them.
        """
        from hotloop.simulate.block import SimulationContext  # noqa: PLC0415  # torch is imported with it

        return SimulationContext(gpu, gpus=gpus, steps=steps, values=values)


sys.modules[__name__].__class__ = _Simulate
