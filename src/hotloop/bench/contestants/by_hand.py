"""The loops that people write themselves: the one that tutorials teach, and the best that an expert can do."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hotloop.bench.contestants.protocol import Started, timed
from hotloop.bench.workloads import TrainingParts
from hotloop.errors import BadArgument
from hotloop.text import printable


def tutorial(parts: TrainingParts, device: torch.device) -> Started:
    """The loop that tutorials teach, in fp32; the loss is not read, so nothing waits that need not."""
    model = parts.model.to(device).train()
    optimizer = parts.optimizer

    def epochs(count: int) -> None:
        for _ in range(count):
            for batch in parts.loader:
                optimizer.zero_grad()
                loss = parts.compute(model, to(batch, device))
                loss.backward()
                optimizer.step()

    return Started(timed(epochs, device))


def to(batch: Any, device: torch.device) -> Any:
    """A batch on the device, each tensor moved as tutorials do it."""
    if isinstance(batch, Mapping):
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return [tensor.to(device) for tensor in batch]


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
