"""Workers of evaluations end with the run that evaluates, and not when the garbage collector comes by."""

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hotloop


class Noise(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(3), torch.rand(1)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_no_worker_of_an_evaluation_is_left(persistent: bool, saved: bool, tmp_path: Path) -> None:
    def workers() -> set[int]:
        return {child.pid for child in psutil.Process().children()}

    before = workers()
    model = nn.Linear(3, 1)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu", plan="plain")
    validate: DataLoader[Any] = DataLoader(Noise(), 8, num_workers=1, persistent_workers=persistent)
    for _ in range(2):
        options = {"save": tmp_path / str(loop.steps)} if saved else {}
        loop.fit(DataLoader(Noise(), 8), epochs=2, validate=validate, progress=False, monitor=False, **options)
        own = {worker.pid for worker in getattr(validate._iterator, "_workers", [])}  # of the person's loader itself
        assert workers() - before - own == set()
