"""`TrainingModes`: train and eval mode of the model and of schedule-free optimizers, which evaluate other weights."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer


class TrainingModes:
    """Puts the model, and optimizers that have `train()` and `eval()`, into train mode for an epoch.

    After it the optimizers are in eval mode.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._model = model
        self._layers: list[bool] = []  # the modes of the layers in the last epoch
        self._optimizers: list[Any] = [
            each for each in optimizers if all(callable(getattr(each, name, None)) for name in ("train", "eval"))
        ]
        self._switch(training=True)

    def begin_epoch(self, *, goes_on: bool) -> bool:
        """Training mode for an epoch; returns whether layers have another mode than in the one before.

        A model as it comes from a hub gets it; layers that were frozen one by one stay so. A module with a `train` of
        its own is asked in each epoch, as in a loop by hand: it may freeze layers there. Not where the epoch `goes_on`
        from a checkpoint, which has the modes of all layers.
        """
        if not self._model.training:
            self._model.train()
        elif not goes_on:
            for module in self._model.modules():  # parents first
                if module.training and getattr(module.train, "__func__", None) is not nn.Module.train:
                    module.train()
        self._switch(training=True)
        before, self._layers = self._layers, [module.training for module in self._model.modules()]
        return self._layers != before

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
