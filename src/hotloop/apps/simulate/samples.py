"""How much a step of a script works on: the samples of its loaders, and the numbers of its forward pass."""

from collections.abc import Callable
from typing import Any, Self

import torch

from hotloop.apps.simulate._torch import fetchers
from hotloop.apps.simulate.events import Listener, Operation
from hotloop.apps.simulate.replaced import Patches
from hotloop.values.tree import tensors_of

CASTS = ("aten._to_copy.default", "aten.copy_.default")  # autocast makes as many numbers of weights whatever the batch


class Samples(Listener):
    """Counts what loaders give where gradients are on, and what operations of the forward pass make."""

    def __init__(self) -> None:
        self.samples = self.numbers = 0  # of the largest step
        self._samples = self._numbers = 0  # of this step so far
        self._patches = Patches()

    def __enter__(self) -> Self:
        for fetcher, count in zip(fetchers(), (_length, _leading), strict=False):
            self._patches.set(fetcher, "fetch", self._counting(fetcher.fetch, count))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.restore()

    def after(self, operation: Operation) -> None:
        if operation.phase == "forward" and operation.name not in CASTS:
            self._numbers += sum(shape.numel for shape in operation.outputs)

    def step(self) -> None:
        self.samples, self.numbers = max(self.samples, self._samples), max(self.numbers, self._numbers)
        self._samples = self._numbers = 0

    def _counting(self, get: Callable[..., Any], count: Callable[[Any, Any], int]) -> Callable[..., Any]:
        def counted(fetcher: Any, index: Any) -> Any:
            data = get(fetcher, index)
            if torch.is_grad_enabled():
                self._samples += count(index, data)
            return data

        return counted


def _length(index: Any, _data: Any) -> int:
    return len(index) if isinstance(index, list | tuple) else 1


def _leading(_index: Any, data: Any) -> int:
    """The first dimension of the first tensor of a batch."""
    return next((len(tensor) if tensor.dim() else 1 for tensor in tensors_of(data)), 0)
