"""Objectives of which one is trained more often than another: as in plain PyTorch, and resumed to the bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import BadArgument, PlanWarning

EPOCHS = 3


def data() -> DataLoader[Any]:
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), 10, shuffle=True, generator=torch.Generator().manual_seed(1))  # eight batches


def networks() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"critic": nn.Linear(4, 1), "generator": nn.Linear(2, 4)})


def fakes(model: Any, real: Tensor) -> Tensor:
    made: Tensor = model["generator"](torch.randn(len(real), 2))
    return made


def critic(model: Any, batch: Any) -> Tensor:
    real = batch[0]
    loss: Tensor = model["critic"](fakes(model, real).detach()).mean() - model["critic"](real).mean()
    return loss


def generator(model: Any, batch: Any) -> Tensor:
    return -model["critic"](fakes(model, batch[0])).mean()  # type: ignore[no-any-return]


def optimizers(model: nn.ModuleDict) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.Adam(part.parameters(), 1e-2) for name, part in model.items()}


def loop_of(every: Mapping[str, int] | None = None, **options: Any) -> hotloop.Loop:
    model = networks()
    given = optimizers(model)
    scheduler = torch.optim.lr_scheduler.StepLR(given["generator"], 2, gamma=0.5)
    return hotloop.Loop(
        model,
        given,
        objective={"critic": critic, "generator": generator},
        device="cpu",
        plan="plain",
        scheduler=scheduler,
        train_every=every,
        **options,
    )


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


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(map(torch.equal, a.state_dict().values(), b.state_dict().values()))


@pytest.mark.parametrize(("every", "accumulate"), [(1, 1), (3, 1), (5, 1), (3, 2)])
def test_it_is_the_plain_loop(every: int, accumulate: int) -> None:
    loop = loop_of({"generator": every}, accumulate=accumulate)
    torch.manual_seed(7)
    report = loop.fit(data(), epochs=EPOCHS, progress=False, monitor=False)
    model, losses = by_hand(every, accumulate)
    if accumulate == 1:
        assert equal(loop.model, model)
        assert report.steps == 24 + len(losses)
    else:
        for a, b in zip(loop.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    if every == 3 and accumulate == 1:  # batches 1, 4 and 7 of the first epoch
        first, second, third = losses[:3]
        assert report.epochs[0].losses["generator"] == pytest.approx((3 * first + 3 * second + 2 * third) / 8), (
            "its last loss stands where it is not trained"
        )


@pytest.mark.parametrize("stop", [4, 9])
def test_it_is_resumed_to_the_bit(tmp_path: Path, stop: int) -> None:
    def run(folder: Path, until: int | None) -> tuple[hotloop.Loop, Any]:
        loop = loop_of({"generator": 5})
        torch.manual_seed(7)
        batches: list[int] = []

        def on_step(record: Any) -> str | None:
            batches.append(1)
            return "stop" if len(batches) == until else None

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hotloop.training.changes.Unsaved.names", lambda self, surely=False: set())  # the hook's list
            options: dict[str, Any] = {"epochs": EPOCHS, "save": folder, "resume": True, "on_step": on_step}
            return loop, loop.fit(data(), progress=False, monitor=False, **options)

    whole, told = run(tmp_path / "whole", None)
    run(tmp_path / "parts", stop)
    parts, report = run(tmp_path / "parts", None)
    assert equal(whole.model, parts.model)
    assert [e.losses for e in report.epochs] == [e.losses for e in told.epochs]
    assert report.curve == told.curve


def test_what_cannot_be_meant_is_refused() -> None:
    for wrong, words in (
        ({"discriminator": 5}, "the objectives are critic, generator"),
        ({"generator": 0}, "whole numbers"),
        ({"generator": 2.0}, "whole numbers"),
        ({"generator": 2, "critic": 3}, "nothing is trained"),
        (5, "the objectives are critic, generator"),
    ):
        with pytest.raises(BadArgument, match=words):
            loop_of(wrong)  # type: ignore[arg-type]
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
        loss: Tensor = model["generator"](batch[0][:, :2]).square().mean()
        return loss

    objectives = {"critic": lambda model, batch: model["critic"](batch[0]).square().mean(), "generator": fool}
    loop = hotloop.Loop(
        model, given, objective=objectives, plan=hotloop.Plan("cuda", graph=1), train_every={"generator": 5}
    )
    with pytest.warns(PlanWarning, match="not every objective is trained on every batch"):
        report = loop.fit(data(), epochs=5, progress=False, monitor=False)
    assert loop.plan.graph == 0
    assert report.steps == 40 + 8
