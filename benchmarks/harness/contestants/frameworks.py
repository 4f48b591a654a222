"""Accelerate, Fabric and Lightning as their manuals teach them, each in the fastest of its simple precisions."""

import logging
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from harness.contestants.protocol import Started, has_bf16, timed
from harness.packages import require
from harness.workloads import TrainingParts
from hotloop.device.clock import synchronize

PACKAGES = {"accelerate": "accelerate", "fabric": "lightning", "lightning": "lightning", "trainer": "transformers"}


def warm_up(names: Iterable[str]) -> None:
    """Import what these need, so that an import counts for nobody; who misses a package says so when it starts."""
    for name in names:
        if name in PACKAGES:
            with _quiet(), suppress(ImportError):
                import_module(PACKAGES[name])


def accelerate(parts: TrainingParts, device: torch.device) -> Started:
    """A loop of one's own with Accelerate."""
    package = require("accelerate")
    # Its settings are shared by the whole process; another device or precision is refused until they are forgotten.
    package.state.AcceleratorState._reset_state(reset_partial_state=True)
    half = has_bf16(device)
    accelerator = package.Accelerator(cpu=device.type == "cpu", mixed_precision="bf16" if half else "no")
    model, optimizer, loader = accelerator.prepare(parts.model, parts.only_optimizer, parts.loader)

    def epochs(count: int) -> None:
        for _ in range(count):
            for batch in loader:
                optimizer.zero_grad()
                loss = parts.compute(model, parts.transformed(batch))
                accelerator.backward(loss)
                optimizer.step()

    return Started(timed(epochs, device), "bf16" if half else "fp32")


def fabric(parts: TrainingParts, device: torch.device) -> Started:
    """A loop of one's own with Lightning Fabric."""
    with _quiet():
        package = require("lightning")
        made = package.Fabric(**_where(device))
        model, optimizer = made.setup(parts.model, parts.only_optimizer)
        loader = made.setup_dataloaders(parts.loader)

    def epochs(count: int) -> None:
        for _ in range(count):
            for batch in loader:
                optimizer.zero_grad()
                loss = parts.compute(model, parts.transformed(batch))
                made.backward(loss)
                optimizer.step()

    return Started(timed(epochs, device), "bf16" if has_bf16(device) else "fp32")


def lightning(parts: TrainingParts, device: torch.device) -> Started:
    """Lightning's Trainer with everything off that does not train; its own set-up is not counted."""
    with _quiet():
        package = require("lightning")
    module, clock = _module(package, parts), _clock(package, device)

    def run(count: int) -> float:
        with _quiet(), _memory_kept():
            trainer = package.Trainer(
                max_epochs=count,
                callbacks=[clock],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                **_where(device),
            )
            trainer.fit(module, parts.loader)
        seconds: float = clock.end - clock.start
        return seconds

    return Started(run, "bf16" if has_bf16(device) else "fp32")


def _module(package: Any, parts: TrainingParts) -> Any:
    optimizer = parts.only_optimizer

    class Module(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = parts.model

        def training_step(self, batch: Any, number: int) -> Tensor:
            return parts.compute(self.model, parts.transformed(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    return Module()


def _clock(package: Any, device: torch.device) -> Any:
    class EpochTimer(package.Callback):  # type: ignore[misc]
        """From the start of the first epoch to the end of the last."""

        start = end = 0.0

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 0:
                synchronize(device)
                self.start = time.perf_counter()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == trainer.max_epochs - 1:
                synchronize(device)
                self.end = time.perf_counter()

    return EpochTimer()


def _where(device: torch.device) -> dict[str, Any]:
    """The device and precision, as Fabric and Lightning want to be told."""
    return {
        "accelerator": device.type,
        "devices": [device.index or 0] if device.type == "cuda" else 1,
        "precision": "bf16-mixed" if has_bf16(device) else "32-true",
    }


@contextmanager
def _memory_kept() -> Iterator[None]:
    """Keep torch's cache of GPU memory: the Trainer empties it when it ends, and whoever runs next would pay."""
    empty_cache = torch.cuda.empty_cache
    torch.cuda.empty_cache = _nothing
    try:
        yield
    finally:
        torch.cuda.empty_cache = empty_cache


def _nothing() -> None:
    pass


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's advice: it would have more workers and other switches, and here all have the same."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\b")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
