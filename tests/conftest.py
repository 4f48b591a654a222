"""What all tests share: the `gpu` marker, a torch that does not fight over the cores, and small things to train."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none (`hotloop device` says why)")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.delenv("HOTLOOP_DEVICE", raising=False)
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path_factory.mktemp("cache")))


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Any wait for the GPU inside is an error."""

    def debug(mode: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode(mode)

    torch.cuda.synchronize()
    debug("error")
    try:
        yield
    finally:
        debug("default")


@pytest.fixture
def no_waits() -> Callable[[], AbstractContextManager[None]]:
    return nothing_waits


@dataclass(frozen=True)
class Task:
    """A small classification task that is the same each time it is asked for."""

    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def dataset(self) -> TensorDataset:
        return TensorDataset(self.inputs, self.targets)

    def loader(self, batch_size: int = 16, *, shuffle: bool = True, **options: object) -> DataLoader:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(self.dataset, batch_size, shuffle=shuffle, generator=generator, **options)

    def model(self, *, dropout: float = 0.0) -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


@pytest.fixture
def task() -> Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(103, 6, generator=generator)  # a prime, so that every batch size leaves a tail
    return Task(inputs, inputs[:, :3].argmax(1))


@pytest.fixture
def sgd() -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
