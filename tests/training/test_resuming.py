"""What resumes where it was, and what says so where it does not: by public names alone."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import hotloop
from hotloop.checkpoint import CheckpointWarning

ITEMS, BATCH = 40, 4


class Rows(IterableDataset[Any]):
    """Rows in their order, with a length."""

    def order(self) -> list[int]:
        return list(range(ITEMS))

    def __iter__(self) -> Iterator[Any]:
        for i in self.order():
            yield torch.tensor([float(i)]), torch.tensor([2.0 * i])

    def __len__(self) -> int:
        return ITEMS


class Shuffled(Rows):
    """In another order in each epoch, which it counts itself."""

    def __init__(self) -> None:
        self.epochs = 0

    def order(self) -> list[int]:
        rows, draws = list(range(ITEMS)), random.Random(self.epochs)  # noqa: S311
        self.epochs += 1
        draws.shuffle(rows)
        return rows


class Unsized(Shuffled):
    __len__ = None  # type: ignore[assignment]


class Stateful(Rows):
    """Goes on from where it says that it is."""

    def __init__(self) -> None:
        self.at = 0

    def order(self) -> Any:
        while self.at < ITEMS:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("stop", [4, 14])  # in the first epoch, and in the second
@pytest.mark.parametrize("kind", [Rows, Shuffled, Unsized, Stateful])
def test_a_dataset_that_is_iterated_resumes_at_its_place_in_the_epoch(
    kind: Callable[[], Rows], stop: int, tmp_path: Path
) -> None:
    def trained(name: str, stop: int | None = None) -> tuple[hotloop.Report, Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-4), nn.MSELoss(), device="cpu", plan="plain")
        report = loop.fit(
            DataLoader(kind(), BATCH),
            epochs=2,
            save=tmp_path / name,
            resume=True,
            on_step=lambda record: "stop" if record.step == stop else None,
            progress=False,
        )
        return report, model.weight.detach()

    whole, expected = trained("whole")
    first, _ = trained("stopped", stop)
    second, weight = trained("stopped")
    assert (first.steps, second.steps) == (stop, whole.steps)
    assert second.curve == whole.curve
    assert torch.equal(weight, expected)


class Counting(nn.Linear):
    """Holds plain values that PyTorch's `state_dict` leaves out, and computes with them."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.seen = bytearray(4)
        self.log = bytearray()
        self.phase = 1 + 0j

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen[len(self.log) % 4] += 1
            self.log.append(len(self.log) % 256)
            self.phase *= 1j
        return super().forward(x) * (1 + self.seen[0] + len(self.log)) + self.phase.real


def test_a_bytearray_and_a_complex_number_of_a_module_resume(tmp_path: Path) -> None:
    def trained(name: str, stop: int | None = None) -> Counting:
        torch.manual_seed(0)
        model = Counting()
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss(), device="cpu", plan="plain")
        data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(6)]
        hook = lambda record: "stop" if record.step == stop else None  # noqa: E731
        loop.fit(data, save=tmp_path / name, resume=True, on_step=hook, progress=False)
        return model

    whole = trained("whole")
    trained("stopped", 3)
    again = trained("stopped")
    assert (again.seen, again.log, again.phase) == (whole.seen, whole.log, whole.phase)
    assert torch.equal(again.weight, whole.weight)


def test_what_the_function_of_a_scheduler_keeps_is_named_when_it_is_saved(tmp_path: Path) -> None:
    calls = 0

    def rate(epoch: int) -> float:
        nonlocal calls
        calls += 1
        return 0.9**calls

    class Decay:
        factor = 1.0

        def rate(self, epoch: int) -> float:
            self.factor *= 0.9
            return self.factor

    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
        torch.optim.lr_scheduler.LambdaLR(optimizer, Decay().rate),
    ]
    loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", plan="plain", scheduler=schedulers)
    data = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(6)]
    with pytest.warns(CheckpointWarning, match=r"holds, .*: calls, scheduler 1.factor"):
        loop.fit(data, save=tmp_path, progress=False)
