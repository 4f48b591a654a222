"""`OptimizerModes`: schedule-free optimizers train other weights than those to evaluate, and have a mode for each."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


class OptimizerModes:
    """Puts optimizers that have `train()` and `eval()` into train mode for an epoch, and into eval mode after it."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers: list[Any] = [
            each for each in optimizers if all(callable(getattr(each, name, None)) for name in ("train", "eval"))
        ]
        self._is_training = False
        self.train()

    def train(self) -> None:
        """Switch to the weights for training."""
        self._switch(training=True)

    def eval(self) -> None:
        """Switch to the weights for evaluation, saving and use."""
        self._switch(training=False)

    @contextmanager
    def within(self, *, training: bool) -> Iterator[None]:
        """One mode inside the block, then the mode of before."""
        before = self._is_training
        self._switch(training=training)
        try:
            yield
        finally:
            self._switch(training=before)

    def _switch(self, *, training: bool) -> None:
        for optimizer in self._optimizers:  # each changes nothing where it is in that mode
            optimizer.train() if training else optimizer.eval()
        self._is_training = training
