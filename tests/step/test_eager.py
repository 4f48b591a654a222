"""Updates: accumulation that equals the full batch, clipping, scaling, several optimizers, schedules."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from hotloop import Loop
from hotloop.errors import BadArgument, LossNotFinite

from ..thorough import tries


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def loop_of(model: nn.Module, lr: float = 0.1, **options: Any) -> Loop:
    options.setdefault("loss", nn.MSELoss())
    return Loop(model, torch.optim.SGD(model.parameters(), lr=lr), device="cpu", **options)


def run(loop: Loop, batches: list[Any]) -> None:
    for batch in loop.batches(batches):
        loop.step(batch)


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=7)


@settings(deadline=None, max_examples=tries(20, 40))
@given(sizes, st.integers(1, 4), st.sampled_from(["mean", "sum"]))
def test_accumulation_equals_the_full_batch_whatever_the_tails(sizes: list[int], window: int, reduction: str) -> None:
    generator = torch.Generator().manual_seed(len(sizes))
    batches = [(torch.randn(n, 3, generator=generator), torch.randn(n, 2, generator=generator)) for n in sizes]
    joined = [
        tuple(torch.cat(parts) for parts in zip(*batches[i : i + window], strict=True))
        for i in range(0, len(batches), window)
    ]
    ours, full = linear(), linear()
    loop = loop_of(ours, 0.01, accumulate=window, loss=nn.MSELoss(reduction=reduction))
    run(loop, batches)
    run(loop_of(full, 0.01, loss=nn.MSELoss(reduction=reduction)), joined)
    torch.testing.assert_close(ours.weight, full.weight, rtol=1e-4, atol=1e-5)
    assert loop.steps == len(joined)


def test_a_batch_whose_loss_is_not_finite_leaves_nothing_behind() -> None:
    """A script may catch the error and go on with the next batch."""
    results = []
    for spoilt in (False, True):
        model = linear()
        loop = loop_of(model, 0.01)
        for number in range(4):
            if spoilt and number == 2:
                with pytest.raises(LossNotFinite):
                    loop.step((torch.full((4, 3), torch.nan), torch.ones(4, 2)))
            loop.step((torch.full((4, 3), float(number)), torch.ones(4, 2)))
        results.append([model.weight.tolist(), loop.steps])
    assert results[0] == results[1]


def test_clipping_holds_after_unscaling() -> None:
    for precision in ("fp32", "fp16"):
        model = linear()
        before = model.weight.detach().clone()
        loop = loop_of(model, 1.0, clip_norm=0.1, precision=precision)
        for _ in range(10):  # fp16 skips a few steps until its scale fits
            if loop.steps == 0:
                loop.step((torch.ones(4, 3), torch.ones(4, 2) * 3))
        moved = (model.weight - before).norm().item()
        assert 0 < moved <= 0.1001, precision


def overflowing(factor: float):
    """An objective whose gradient is too large for the initial scale while the batch says so."""

    def objective(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(torch.ones(1, 3)).mean().float() * (factor if bool(batch[0]) else 1.0)

    return objective


@pytest.mark.parametrize("schedule", ["step", "epoch"])
def test_a_skipped_step_does_not_advance_the_scheduler(schedule: Any) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = ExponentialLR(optimizer, 0.5)
    options = {"precision": "fp16", "scheduler": scheduler, "schedule": schedule}
    loop = Loop(model, optimizer, objective=overflowing(1e37), device="cpu", **options)
    before = model.weight.detach().clone()
    loop.step(torch.tensor([1]))
    assert (loop.steps, loop.skipped) == (0, 1)
    assert torch.equal(model.weight, before)
    assert scheduler.get_last_lr() == [1.0]
    loop.step(torch.tensor([0]))
    assert (loop.steps, loop.skipped) == (1, 1)
    assert scheduler.get_last_lr() == [0.5 if schedule == "step" else 1.0]


def test_objectives_and_optimizers_must_pair() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for wrong in (optimizer, {"other": optimizer}):
        with pytest.raises(BadArgument, match="same names"):
            Loop(model, wrong, objective={"critic": lambda model, batch: model(batch).mean()}, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_on_cuda(fused: bool) -> None:
    model = linear()
    model.cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, fused=fused)
    scheduler = ExponentialLR(optimizer, 0.5)

    def objective(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(torch.ones(1, 3, device="cuda")).mean().float() * batch[0]

    loop = Loop(model, optimizer, objective=objective, device="cuda", precision="fp16", scheduler=scheduler)
    before = model.weight.detach().clone()
    loop.step(torch.tensor([1e37]))
    assert (loop.steps, loop.skipped) == (0, 1)
    assert torch.equal(model.weight, before)
    assert scheduler.get_last_lr() == [1.0]
    loop.step(torch.tensor([1.0]))
    assert (loop.steps, scheduler.get_last_lr()) == (1, [0.5])


def test_hooks_of_an_optimizer_run_and_a_profiler_sees_its_step() -> None:
    model, seen = linear(), []
    loop = loop_of(model)
    batch = [torch.ones(2, 3), torch.ones(2, 2)]
    for _ in range(4):  # the first steps are guarded
        loop.step(batch)
    handle = loop.optimizers[0].register_step_post_hook(lambda *_: seen.append(loop.steps))
    loop.step(batch)
    handle.remove()
    loop.step(batch)
    assert seen == [4]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loop.step(batch)
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


class InPlace(torch.optim.SGD):
    """Sets gradients to zero where they are, as before PyTorch 2."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.zero_()


def test_accumulation_with_a_zero_grad_that_writes_zeros() -> None:
    batches = [(torch.randn(8, 3), torch.randn(8, 2)) for _ in range(4)]
    ended = []
    for kind in (torch.optim.SGD, InPlace):
        model = linear()
        run(Loop(model, kind(model.parameters(), lr=0.1), nn.MSELoss(), device="cpu", accumulate=2), batches)
        ended.append(model.weight)
    assert torch.equal(*ended)


@pytest.mark.parametrize("place", [InPlace, Optimizer], ids=["its own", "everyone's"])
def test_a_zero_grad_that_was_put_in_the_place_of_pytorchs_is_called(
    place: type[Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = linear(), []
    kind = torch.optim.SGD if place is Optimizer else place
    loop = Loop(model, kind(model.parameters(), lr=0.1), nn.MSELoss(), device="cpu", plan="plain")
    monkeypatch.setattr(place, "zero_grad", lambda *_, **__: calls.append(1))
    run(loop, [(torch.ones(2, 3), torch.ones(2, 2))] * 3)
    assert calls == [1] * 3


def test_a_frozen_layer_beside_several_objectives() -> None:
    model = nn.ModuleDict({"generator": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "critic": nn.Linear(4, 1)})
    generator, critic = model["generator"], model["critic"]
    assert isinstance(generator, nn.Sequential)
    generator[0].requires_grad_(False)
    frozen, trained = generator[0].weight.clone(), generator[1].weight.clone()
    loop = Loop(
        model,
        {name: torch.optim.SGD(part.parameters(), 0.1) for name, part in model.items()},
        objective={
            "generator": lambda model, batch: -critic(generator(batch)).mean(),
            "critic": lambda model, batch: critic(generator(batch).detach()).mean(),
        },
        device="cpu",
    )
    run(loop, [torch.randn(8, 4)] * 2)
    assert torch.equal(generator[0].weight, frozen)
    assert not torch.equal(generator[1].weight, trained)


def test_the_norm_of_sparse_gradients_is_not_asked_for(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(9, 2))

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return F.embedding(words, self.table, sparse=True).mean(1)

    batches = [(torch.randint(9, (4, 3)), torch.randn(4, 2)) for _ in range(4)]
    report = loop_of(Words()).fit(batches, log=tmp_path / "log.jsonl", progress=False)
    assert report.steps == 4
