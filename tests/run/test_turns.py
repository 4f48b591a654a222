"""Objectives of which one is trained more often than another: as in plain PyTorch, and resumed to the bit."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import BadArgument, PlanWarning

from ..same import same
from .test_state import Script, assert_resumed_alike

EPOCHS = 3


def data() -> DataLoader[Any]:
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), 10, shuffle=True, generator=torch.Generator().manual_seed(1))  # eight batches


def networks() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"critic": nn.Linear(4, 1), "generator": nn.Linear(2, 4)})


def fakes(model: Any, real: Tensor) -> Tensor:
    return model["generator"](torch.randn(len(real), 2))


def critic(model: Any, batch: Any) -> Tensor:
    real = batch[0]
    return model["critic"](fakes(model, real).detach()).mean() - model["critic"](real).mean()


def generator(model: Any, batch: Any) -> Tensor:
    return -model["critic"](fakes(model, batch[0])).mean()


def optimizers(model: nn.ModuleDict) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.Adam(part.parameters(), 1e-2) for name, part in model.items()}


def loop_of(every: Mapping[str, int] | None = None, **options: Any) -> hotloop.Loop:
    model = networks()
    given = optimizers(model)
    options["scheduler"] = torch.optim.lr_scheduler.StepLR(given["generator"], 2, gamma=0.5)
    goals = {"critic": critic, "generator": generator}
    return hotloop.Loop(model, given, objective=goals, device="cpu", plan="plain", train_every=every, **options)


def by_hand(every: int, accumulate: int = 1) -> tuple[nn.Module, list[float]]:
    """The plain twin: the critic in every update, the generator in the first of so many."""
    model = networks()
    given = optimizers(model)
    scheduler = torch.optim.lr_scheduler.StepLR(given["generator"], 2, gamma=0.5)
    loader, windows, losses = data(), 0, []
    torch.manual_seed(7)
    for _ in range(EPOCHS):
        batches = list(loader)
        for start in range(0, len(batches), accumulate):
            window = batches[start : start + accumulate]
            trained = ["critic", "generator"] if windows % every == 0 else ["critic"]
            windows += 1
            for optimizer in given.values():
                optimizer.zero_grad()
            for batch in window:
                for name in trained:
                    loss = {"critic": critic, "generator": generator}[name](model, batch)
                    loss.backward(inputs=list(model[name].parameters()))
                    if name == "generator":
                        losses.append(loss.item())
                    if batch is window[-1]:
                        for parameter in model[name].parameters():
                            parameter.grad /= len(window)
                        given[name].step()
            if "generator" in trained:
                scheduler.step()
    return model, losses


@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_is_the_plain_loop(accumulate: int) -> None:
    loop = loop_of({"generator": 3}, accumulate=accumulate)
    torch.manual_seed(7)
    report = loop.fit(data(), epochs=EPOCHS, progress=False, monitor=False)
    model, losses = by_hand(3, accumulate)
    if accumulate == 1:
        assert same(loop.model.state_dict(), model.state_dict())
        assert report.steps == 24 + len(losses)
        first, second, third = losses[:3]  # of batches 1, 4 and 7 of the first epoch
        assert report.epochs[0].losses["generator"] == pytest.approx((3 * first + 3 * second + 2 * third) / 8), (
            "its last loss stands where it is not trained"
        )
    else:
        for a, b in zip(loop.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("stop", [4, 9])
def test_it_is_resumed_to_the_bit(stop: int) -> None:
    assert_resumed_alike(lambda: Script(loop_of({"generator": 5}), data()), [stop], EPOCHS)


def test_what_cannot_be_meant_is_refused() -> None:
    for wrong, words in (
        ({"discriminator": 5}, "the objectives are critic, generator"),
        ({"generator": 0}, "whole numbers"),
        ({"generator": 2.0}, "whole numbers"),
        ({"generator": 2, "critic": 3}, "nothing is trained"),
        (5, "the objectives are critic, generator"),
    ):
        with pytest.raises(BadArgument, match=words):
            loop_of(wrong)
    model = nn.Linear(1, 1)
    with pytest.raises(BadArgument, match="none by name"):
        hotloop.Loop(
            model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu", train_every={"loss": 2}
        )


@pytest.mark.gpu
def test_it_is_not_captured_and_says_so() -> None:
    model = networks().cuda()
    given = optimizers(model)

    def fool(model: Any, batch: Any) -> Tensor:
        return model["generator"](batch[0][:, :2]).square().mean()

    objectives = {"critic": lambda model, batch: model["critic"](batch[0]).square().mean(), "generator": fool}
    loop = hotloop.Loop(
        model, given, objective=objectives, plan=hotloop.Plan("cuda", graph=1), train_every={"generator": 5}
    )
    with pytest.warns(PlanWarning, match="not every objective is trained on every batch"):
        report = loop.fit(data(), epochs=5, progress=False, monitor=False)
    assert loop.plan.graph == 0
    assert report.steps == 40 + 8
