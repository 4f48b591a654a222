"""Updates: accumulation that equals the full batch, clipping, scaling, several optimizers, schedules."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

from hotloop import Loop
from hotloop.errors import BadArgument, LossNotFinite


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


@settings(deadline=None, max_examples=40)
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


@pytest.mark.parametrize("as_tensor", [False, True])
def test_accumulation_by_tokens(as_tensor: bool) -> None:
    """Sequences of different length: the mean is over tokens, not over sequences."""

    def objective(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        kept = batch["mask"]
        loss = (model(batch["x"]).square().mean(-1) * kept).sum() / kept.sum()
        return loss, kept.sum() if as_tensor else int(kept.sum())

    x = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(6) < torch.tensor([[6], [1], [3], [2]])).float()
    full = {"x": x, "mask": mask}
    halves = [{"x": x[:2], "mask": mask[:2]}, {"x": x[2:], "mask": mask[2:]}]
    one, two = linear(), linear()
    run(loop_of(one, loss=None, objective=objective), [full])
    run(loop_of(two, loss=None, objective=objective, accumulate=2), halves)
    torch.testing.assert_close(one.weight, two.weight)


def test_a_window_cut_short_by_the_end_of_the_epoch_is_updated() -> None:
    loop = loop_of(linear(), accumulate=4)
    run(loop, [(torch.ones(1, 3), torch.ones(1, 2))] * 6)
    assert loop.steps == 2


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
    loop = Loop(
        model,
        optimizer,
        objective=overflowing(1e37),
        device="cpu",
        precision="fp16",
        scheduler=scheduler,
        schedule=schedule,
    )
    before = model.weight.detach().clone()
    loop.step(torch.tensor([1]))
    assert (loop.steps, loop.skipped) == (0, 1)
    assert torch.equal(model.weight, before)
    assert scheduler.get_last_lr() == [1.0]
    loop.step(torch.tensor([0]))
    assert (loop.steps, loop.skipped) == (1, 1)
    assert scheduler.get_last_lr() == [0.5 if schedule == "step" else 1.0]


def test_schedules_by_step_and_by_epoch() -> None:
    batches = [(torch.ones(1, 3), torch.ones(1, 2))] * 6
    for schedule, accumulate, expected in (("step", 1, 6), ("step", 2, 3), ("step", 4, 2), ("epoch", 1, 1)):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        loop = Loop(
            model,
            optimizer,
            nn.MSELoss(),
            device="cpu",
            scheduler=scheduler,
            schedule=schedule,  # type: ignore[arg-type]
            accumulate=accumulate,
        )
        run(loop, batches)
        assert scheduler.get_last_lr() == [0.5**expected]


def test_a_plateau_watches_the_validation_loss() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    loop = Loop(model, optimizer, nn.MSELoss(), device="cpu", scheduler=scheduler)
    batch = (torch.ones(2, 3), torch.ones(2, 2))
    loop.fit([batch], epochs=3, validate=[batch], progress=False)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-7)


def test_several_optimizers_follow_one_objective() -> None:
    model = nn.Sequential(linear(), nn.Linear(2, 2))
    before = [p.detach().clone() for p in model.parameters()]
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[1].parameters(), 0.1)]
    loop = Loop(model, optimizers, nn.MSELoss(), device="cpu")
    loop.step((torch.ones(2, 3), torch.ones(2, 2)))
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert loop.steps == 1


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(3, 2), nn.Linear(2, 1)


def critic_loss(model: Gan, batch: torch.Tensor) -> torch.Tensor:
    fake = model.generator(batch)  # not detached on purpose: the turn alone must keep the generator out of it
    return F.softplus(model.critic(fake)).mean()


def generator_loss(model: Gan, batch: torch.Tensor) -> torch.Tensor:
    return F.softplus(-model.critic(model.generator(batch))).mean()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_objectives_take_turns_and_touch_only_their_own_weights(accumulate: int) -> None:
    ours, plain = Gan(), Gan()
    optimizers = {
        "critic": torch.optim.SGD(ours.critic.parameters(), 0.5),
        "gen": torch.optim.SGD(ours.generator.parameters(), 0.5),
    }
    loop = Loop(
        ours,
        optimizers,
        objective={"critic": critic_loss, "gen": generator_loss},
        device="cpu",
        accumulate=accumulate,
    )
    batches = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1))
    run(loop, list(batches))

    by_hand = torch.optim.SGD(plain.critic.parameters(), 0.5), torch.optim.SGD(plain.generator.parameters(), 0.5)
    for i in range(0, 4, accumulate):
        joined = batches[i : i + accumulate].flatten(0, 1)
        for optimizer, loss in zip(by_hand, (critic_loss, generator_loss), strict=True):
            plain.zero_grad()
            loss(plain, joined).backward()
            optimizer.step()
    if accumulate == 1:
        assert torch.equal(ours.generator.weight, plain.generator.weight)
        assert torch.equal(ours.critic.weight, plain.critic.weight)
    assert loop.steps == 2 * 4 // accumulate
    report = loop.fit(list(batches), progress=False)
    assert set(report.epochs[0].losses) == {"critic", "gen"}


def test_objectives_and_optimizers_must_pair() -> None:
    model = Gan()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for wrong in (optimizer, {"other": optimizer}):
        with pytest.raises(BadArgument, match="same names"):
            Loop(model, wrong, objective={"critic": critic_loss}, device="cpu")


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
