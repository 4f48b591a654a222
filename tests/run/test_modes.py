"""Schedule-free optimizers: trained in one mode, evaluated, saved and used in the other."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop

from ..same import same
from .test_state import Script, assert_resumed_alike

schedulefree = pytest.importorskip("schedulefree")
Optimizers = Callable[[Any], Any]
OPTIMIZERS: dict[str, Optimizers] = {
    "AdamW": partial(schedulefree.AdamWScheduleFree, lr=0.02, warmup_steps=3),
    "AdamW, one tensor at a time": partial(schedulefree.AdamWScheduleFree, lr=0.02, foreach=False),
    "SGD": partial(schedulefree.SGDScheduleFree, lr=0.5),
    "RAdam": partial(schedulefree.RAdamScheduleFree, lr=0.02),
}
X = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X[:, :4].argmax(1))
EPOCHS = 3


class Made(NamedTuple):
    model: nn.Module
    optimizer: Any
    loop: hotloop.Loop

    def fit(self, **options: Any) -> hotloop.Report:
        return self.loop.fit(loader(), validate=DataLoader(DATA, 30), progress=False, **options)


def loader() -> DataLoader[Any]:
    return DataLoader(DATA, 8, shuffle=True, generator=torch.Generator().manual_seed(3))


def made(optimizers: Optimizers) -> Made:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = optimizers(model.parameters())
    return Made(model, optimizer, hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu"))


def by_hand(optimizers: Optimizers) -> tuple[nn.Module, list[float]]:
    model, optimizer, _ = made(optimizers)
    losses = []
    batches = loader()
    for _ in range(EPOCHS):
        model.train()
        optimizer.train()
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        optimizer.eval()
        losses.append(loss_of(model))
    return model, losses


def stop_after(steps: int) -> Callable[[Any], str | None]:
    return lambda record: "stop" if record.step == steps else None


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    return float(nn.functional.cross_entropy(model(X), DATA.tensors[1]))


def weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("optimizers", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_fit_is_the_loop_of_their_documentation(optimizers: Optimizers) -> None:
    expected, losses = by_hand(optimizers)
    run = made(optimizers)
    report = run.fit(epochs=EPOCHS)
    assert same(weights(run.model), weights(expected))
    assert [epoch.metrics["loss"] for epoch in report.epochs] == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("steps", [5, 8, 13], ids=["in the first epoch", "after it", "in the second"])
def test_a_run_that_is_resumed_is_the_one_that_was_not_stopped(steps: int) -> None:
    assert_resumed_alike(lambda: Script(made(OPTIMIZERS["AdamW"]).loop, loader()), [steps], EPOCHS)


def test_a_checkpoint_after_an_epoch_has_the_weights_to_use(tmp_path: Path) -> None:
    run = made(OPTIMIZERS["AdamW"])
    report = run.fit(epochs=EPOCHS, save=tmp_path)
    other = made(OPTIMIZERS["SGD"]).model
    hotloop.load_weights(other, tmp_path)
    assert loss_of(other) == pytest.approx(report.epochs[-1].metrics["loss"], rel=1e-5)


def test_the_best_weights_are_those_that_were_evaluated() -> None:
    run = made(OPTIMIZERS["SGD"])

    def spoil(record: Any) -> None:
        if record.epoch.number == 2:
            run.optimizer.param_groups[0]["lr"] = 50.0

    report = run.fit(epochs=4, restore_best=True, on_epoch=spoil, on_step=stop_after(29))
    losses = [epoch.metrics["loss"] for epoch in report.epochs if "loss" in epoch.metrics]
    assert min(losses) < losses[-1]
    assert loss_of(run.model) == pytest.approx(min(losses), rel=1e-5)


def test_evaluation_in_an_epoch_is_of_the_weights_to_use() -> None:
    run, expected = made(OPTIMIZERS["SGD"]), made(OPTIMIZERS["SGD"])
    expected.optimizer.train()
    for number, (x, y) in enumerate(loader()):
        expected.optimizer.zero_grad()
        nn.functional.cross_entropy(expected.model(x), y).backward()
        expected.optimizer.step()
        if number == 3:
            expected.optimizer.eval()
            loss = loss_of(expected.model)
            expected.optimizer.train()
    expected.optimizer.eval()
    for number, batch in enumerate(run.loop.batches(loader())):
        run.loop.step(batch)
        if number == 3:
            assert run.loop.evaluate(DataLoader(DATA, 60))["loss"] == pytest.approx(loss, rel=1e-5)
    assert same(weights(run.model), weights(expected.model))


def test_a_step_without_an_epoch_trains() -> None:
    run = made(OPTIMIZERS["AdamW"])
    before = weights(run.model)
    run.loop.step((X[:8], DATA.tensors[1][:8]))
    assert not same(weights(run.model), before)


@pytest.mark.parametrize(
    "ask",
    [
        lambda loop: loop.predict(DataLoader(DATA, 30), progress=False),
        lambda loop: loop.largest_batch(loader(), limit=16, seconds=1),
        lambda loop: loop.memory((X[:8], DATA.tensors[1][:8])),
        lambda loop: loop.profile(loader(), steps=3, progress=False),
        lambda loop: loop.tune(loader(), steps=10, progress=False),
    ],
    ids=["predict", "largest_batch", "memory", "profile", "tune"],
)
def test_what_is_asked_after_a_run_finds_the_mode_that_it_needs(ask: Callable[[hotloop.Loop], object]) -> None:
    run = made(OPTIMIZERS["AdamW"])
    run.fit(epochs=1)
    before = weights(run.model)
    ask(run.loop)
    assert not run.optimizer.param_groups[0]["train_mode"]
    for now, then in zip(weights(run.model), before, strict=True):
        torch.testing.assert_close(now, then)
    run.fit(epochs=1)
    assert not same(weights(run.model), before)
