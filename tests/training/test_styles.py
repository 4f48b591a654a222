"""Models in the styles that people write train without glue, each as a loop by hand would."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hotloop
from hotloop.errors import BadArgument

X = torch.linspace(-1, 1, 60).view(20, 3)
Y = (X.sum(1) > 0).long()
PAIRS = [(X[i : i + 5], Y[i : i + 5]) for i in range(0, 20, 5)]
DICTS = [{"x": x, "y": y} for x, y in PAIRS]


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def both(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layer(x)
        return logits, functional.cross_entropy(logits, y)


class LogitsAndLoss(Base):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return self.both(x, y)  # type: ignore[arg-type]


class LossAndLogits(Base):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.both(x, y)[::-1]


class BareLoss(Base):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.both(x, y)[1]


class Mapped(Base):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return dict(zip(("logits", "loss"), self.both(x, y), strict=True))


class Data(Base):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return Output(*self.both(x, y))


class Named(Base):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return namedtuple("Out", "loss logits")(*self.both(x, y)[::-1])


class WholeBatch(Base):
    def forward(self, batch: Any) -> Any:
        return self.both(*batch)[1]


class HasLogits(Base):
    def forward(self, x: Tensor) -> Any:
        return Output(self.layer(x))


STYLES: list[tuple[type[Base], Any, dict[str, Any]]] = [
    (LogitsAndLoss, PAIRS, {}),
    (LogitsAndLoss, DICTS, {}),
    (LossAndLogits, PAIRS, {}),
    (BareLoss, PAIRS, {}),
    (BareLoss, DICTS, {}),
    (Mapped, PAIRS, {}),
    (Data, DICTS, {}),
    (Data, PAIRS, {}),
    (Named, PAIRS, {}),
    (WholeBatch, PAIRS, {}),
    (HasLogits, PAIRS, {"loss": nn.CrossEntropyLoss()}),
    (HasLogits, PAIRS, {"loss": nn.CrossEntropyLoss(), "accumulate": 2}),
    (BareLoss, PAIRS, {"accumulate": 2}),
]


def by_hand(accumulate: int) -> Tensor:
    model = Base()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for start in range(0, 20, 5 * accumulate):
        rows = slice(start, start + 5 * accumulate)
        optimizer.zero_grad()
        model.both(X[rows], Y[rows])[1].backward()
        optimizer.step()
    return model.layer.weight


@pytest.mark.parametrize(("kind", "batches", "options"), STYLES)
def test_it_trains_as_the_loop_by_hand(kind: type[Base], batches: Any, options: dict[str, Any]) -> None:
    model = kind()
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), device="cpu", plan="plain", **options)
    loop.fit(batches, progress=False)
    torch.testing.assert_close(model.layer.weight, by_hand(options.get("accumulate", 1)))


def test_metrics_see_the_logits() -> None:
    model = HasLogits()
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), device="cpu")
    scores = loop.evaluate(PAIRS, {"accuracy": hotloop.metrics.accuracy, "top2": hotloop.metrics.top_k(2)})
    assert scores["accuracy"] == pytest.approx(float((model.layer(X).argmax(1) == Y).float().mean()))
    assert scores["top2"] == 1.0
    assert torch.equal(loop.predict(PAIRS), model.layer(X).detach())


class NoLoss(Base):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.layer(x), self.layer(x)


def test_a_model_without_a_loss_is_refused_with_the_call_that_was_tried() -> None:
    model = NoLoss()
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), device="cpu", plan="plain")
    with pytest.raises(BadArgument, match=r"model\(\*batch\)") as error:
        loop.fit(PAIRS, progress=False)
    assert "objective=lambda model, batch" in str(error.value)
