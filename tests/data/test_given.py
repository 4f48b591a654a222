"""What is given in place of a loader, or of a batch, is an error that says what to do, or is trained on."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import hotloop
from hotloop.errors import BadArgument


class Items(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        x = torch.linspace(0, 1, 24 * 3).view(24, 3)
        yield from zip(x, x.sum(1, keepdim=True), strict=True)


class Batches(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from DataLoader(Items(), 8)


def loop(objective: Any = None) -> hotloop.Loop:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    given: Any = {"loss": nn.MSELoss()} if objective is None else {"objective": objective}
    return hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), device="cpu", **given)


def _forgetful(items: Any) -> None:
    """It returns nothing."""


LOADER = DataLoader(Items(), 8)
AS_ITEMS = r"Items, an IterableDataset(.|\n)*fix: .*DataLoader\(dataset, batch_size=32\).*batch_size=None\)"
NOTHING = r"a batch is None(.|\n)*fix: return the batch"
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "items to train on": (lambda: loop().fit(Items(), progress=False), AS_ITEMS),
    "items in a loop by hand": (lambda: next(loop().batches(Items())), AS_ITEMS),
    "items to validate with": (lambda: loop().fit(LOADER, validate=Items(), progress=False), AS_ITEMS),
    "items to stream": (lambda: hotloop.stream(Items(), "cpu"), AS_ITEMS),
    "nothing": (lambda: loop().fit([None] * 3, progress=False), NOTHING),
    "nothing after a batch": (lambda: loop().fit([*LOADER, None], progress=False), NOTHING),
    "nothing of a collate_fn": (lambda: loop().fit(DataLoader(Items(), 8, collate_fn=_forgetful)), NOTHING),
    "nothing of a transform": (lambda: loop().fit(LOADER, device_transform=_forgetful, progress=False), NOTHING),
}


@pytest.mark.parametrize(("call", "said"), WRONG.values(), ids=WRONG)
def test_it_is_refused_with_a_fix(call: Callable[[], object], said: str) -> None:
    with pytest.raises(BadArgument, match=said):
        call()


def test_a_loader_says_that_a_dataset_gives_whole_batches() -> None:
    given, own = loop(), loop()
    given.fit(DataLoader(Batches(), batch_size=None), progress=False)
    own.fit(LOADER, progress=False)
    assert all(map(torch.equal, given.model.parameters(), own.model.parameters()))


def test_an_objective_that_needs_no_batch_is_trained_as_by_hand() -> None:
    """As one that draws its own points."""

    def objective(model: nn.Module, batch: None) -> Tensor:
        return model(torch.rand(8, 3)).square().mean()

    ours = loop(objective)
    report = ours.fit([None] * 120, epochs=2, progress=False)
    by_hand = loop()
    for _ in range(240):
        by_hand.optimizers[0].zero_grad()
        objective(by_hand.model, None).backward()
        by_hand.optimizers[0].step()
    assert report.steps == 240
    assert report.epochs[-1].loss < report.epochs[0].loss
    assert all(map(torch.equal, ours.model.parameters(), by_hand.model.parameters()))
