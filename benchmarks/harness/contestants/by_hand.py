"""The loops that people write themselves: a tutorial's, a careful person's, and the best that an expert can do."""

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from harness.contestants.protocol import Losses, Started, has_bf16, timed
from harness.workloads import TrainingParts
from hotloop.errors import BadArgument
from hotloop.printing.text import printable


def tutorial(parts: TrainingParts, device: torch.device) -> Started:
    """The loop that tutorials teach, in fp32; the loss is not read, so nothing waits that need not."""
    return _started(tutorial_steps, parts, device)


def careful(parts: TrainingParts, device: torch.device) -> Started:
    """What a careful person writes: autocast to bf16 where the GPU has it, pinned memory, workers that stay."""
    return _started(careful_steps, parts, device, "bf16" if has_bf16(device) else "fp32")


def tutorial_steps(parts: TrainingParts, device: torch.device, epochs: int | None = None) -> Iterator[Losses]:
    """The tutorial's loop, which pauses after each step; without a number of epochs it goes on for ever."""
    model = parts.model.to(device).train()
    updates = parts.updates
    for _ in _many(epochs):
        for loaded in parts.loader:
            batch = parts.transformed(to(loaded, device))
            losses = []
            for objective, optimizer in updates:
                optimizer.zero_grad()
                loss = objective(model, batch)
                loss.backward()
                optimizer.step()
                losses.append(loss)
            yield losses


def careful_steps(parts: TrainingParts, device: torch.device, epochs: int | None = None) -> Iterator[Losses]:
    """The careful person's loop, which pauses after each step; without a number of epochs it goes on for ever."""
    model = parts.model.to(device).train()
    updates, loader, half = parts.updates, _careful_loader(parts.loader, device), has_bf16(device)
    for _ in _many(epochs):
        for loaded in loader:
            batch = parts.transformed(to(loaded, device, non_blocking=True))
            losses = []
            for objective, optimizer in updates:
                with torch.autocast(device.type, torch.bfloat16, enabled=half):
                    loss = objective(model, batch)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                losses.append(loss)
            yield losses


def _careful_loader(loader: DataLoader[Any], device: torch.device) -> DataLoader[Any]:
    """The same batches, pinned for a GPU, from workers that live through all epochs."""
    return DataLoader(
        loader.dataset,
        loader.batch_size,
        shuffle=True,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=device.type == "cuda",
        persistent_workers=loader.num_workers > 0,
        generator=loader.generator,
    )


def _started(
    steps: Callable[[TrainingParts, torch.device, int | None], Iterator[Losses]],
    parts: TrainingParts,
    device: torch.device,
    note: str = "",
) -> Started:
    parts.model.to(device).train()

    def epochs(count: int) -> None:
        for _ in steps(parts, device, count):
            pass

    return Started(timed(epochs, device), note, steps=lambda: steps(parts, device, None))


def _many(epochs: int | None) -> Iterable[int]:
    return itertools.count() if epochs is None else range(epochs)


def to(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """A batch on the device, each tensor moved as tutorials do it."""
    if isinstance(batch, Mapping):
        return {name: tensor.to(device, non_blocking=non_blocking) for name, tensor in batch.items()}
    return [tensor.to(device, non_blocking=non_blocking) for tensor in batch]


def expert(parts: TrainingParts, device: torch.device, *, folder: Path) -> Started:
    """The loop that an expert wrote for this workload: `expert(parts, device) → run` in a file of its name."""
    path = folder / f"{parts.workload}.py"
    if not path.is_file():
        shown = printable(str(path))
        raise BadArgument(f"there is no loop of an expert for it: {shown}", fix="write one, or leave the expert out")
    return Started(_load(path)(parts, device))


def _load(path: Path) -> Callable[[TrainingParts, torch.device], Callable[[int], float]]:
    spec = importlib.util.spec_from_file_location(f"expert_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _neighbours(path.parent.resolve()):
        spec.loader.exec_module(module)
    start: Callable[[TrainingParts, torch.device], Callable[[int], float]] = module.expert
    return start


@contextmanager
def _neighbours(folder: Path) -> Iterator[None]:
    """Let a file import those beside it; afterwards their names are free for another folder's."""
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            origin = getattr(sys.modules[name], "__file__", None)
            if origin is not None and Path(origin).resolve().parent == folder:
                del sys.modules[name]
