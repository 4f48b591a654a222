"""`Loop`: the same training as the loop written by hand, on any device, with help when something does not fit."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotloop
from hotloop import DeviceMismatch, Loop
from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.errors import BadArgument, BatchError, DeviceUnavailable, PlanWarning


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def by_hand(model, optimizer, loader, *, epochs=2, clip=None, device="cpu", dtype=None):
    """The loop that tutorials teach; its losses."""
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            x, y = x.to(device), y.to(device)  # noqa: PLW2901
            optimizer.zero_grad()
            with torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype is not None):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
    return losses


def with_loop(loop: Loop, loader, *, epochs=2) -> list[float]:
    return [loop.step(batch).item() for _ in range(epochs) for batch in loop.batches(loader)]


def loop_of(task: Any, build: Callable[[nn.Module], torch.optim.Optimizer], **options: Any) -> Loop:
    model = task.model()
    return Loop(model, build(model), nn.CrossEntropyLoss(), device="cpu", **options)


def test_clipping_is_that_by_hand_to_the_bit_where_groups_are_not_in_the_order_of_the_model(task) -> None:
    def decayed_and_others(model: nn.Module) -> torch.optim.Optimizer:
        weights, others = ([p for p in model.parameters() if (p.dim() > 1) == kind] for kind in (True, False))
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01)

    plain = task.model()
    expected = by_hand(plain, decayed_and_others(plain), task.loader(), clip=0.5)
    loop = loop_of(task, decayed_and_others, clip_norm=0.5)
    assert with_loop(loop, task.loader()) == expected
    assert all(map(torch.equal, plain.parameters(), loop.model.parameters()))


def test_a_model_in_eval_mode_is_put_in_training_and_frozen_layers_stay_frozen(task, sgd) -> None:
    model = task.model().eval()
    loop = Loop(model, sgd(model), nn.CrossEntropyLoss(), device="cpu")
    for _ in loop.batches(task.loader()):
        assert model.training
        break
    model[2].eval()
    for batch in loop.batches(task.loader()):
        loop.step(batch)
    assert not model[2].training


@pytest.mark.parametrize("is_whole", [True, False])
def test_layers_that_a_train_of_its_own_freezes_are_frozen_as_by_hand(is_whole: bool) -> None:
    class Backbone(nn.Sequential):
        frozen = 2  # epochs

        def train(self, mode: bool = True) -> "Backbone":
            super().train(mode)
            if self.frozen:
                self[1].eval()
            return self

    torch.manual_seed(0)
    backbone = Backbone(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    models = [backbone if is_whole else nn.Sequential(backbone) for backbone in (backbone, copy.deepcopy(backbone))]
    x = torch.linspace(-1, 2, 24).view(8, 3)
    batches = [(x[:4], x[:4].sum(1, keepdim=True)), (x[4:], x[4:].sum(1, keepdim=True))]

    def thaw(model: nn.Module) -> None:
        (model if is_whole else model[0]).frozen -= 1

    loop = Loop(models[0], torch.optim.SGD(models[0].parameters(), 0.1), nn.MSELoss(), device="cpu", plan="plain")
    loop.fit(batches, epochs=4, progress=False, on_epoch=lambda record: thaw(record.model))
    optimizer = torch.optim.SGD(models[1].parameters(), 0.1)
    for _ in range(4):
        models[1].train()
        for inputs, target in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(models[1](inputs), target).backward()
            optimizer.step()
        thaw(models[1])
    mine, by_hand = (model.state_dict() for model in models)
    assert all(torch.equal(mine[name], by_hand[name]) for name in by_hand)


def test_a_train_of_its_own_is_asked_once_in_an_epoch_that_is_resumed(tmp_path) -> None:
    class Counting(nn.Sequential):
        epochs = 0

        def train(self, mode: bool = True) -> "Counting":
            self.epochs += mode
            return super().train(mode)

    x = torch.linspace(-1, 2, 24).view(8, 3)
    batches = [(x[:4], x[:4].sum(1, keepdim=True)), (x[4:], x[4:].sum(1, keepdim=True))]
    for resume in (False, True):
        model = Counting(nn.Linear(3, 1))
        model.epochs = 0
        loop = Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu", plan="plain")
        stop = None if resume else (lambda record: "stop" if record.step == 3 else None)
        loop.fit(batches, epochs=3, save=tmp_path, resume=resume, progress=False, on_step=stop)
        assert model.epochs == (3 if resume else 2)


def test_hooks_that_transformers_installs_in_the_first_call_are_installed_once(tmp_path, sgd) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=9, n_positions=8, n_embd=8, n_layer=2, n_head=1, bos_token_id=0, output_hidden_states=True
    )
    batches = [{"input_ids": (ids := torch.arange(24).view(4, 6) % 9), "labels": ids}] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        warnings.simplefilter("error", CheckpointWarning)
        for setting in ({}, {"micro_batch": 2}):
            model = transformers.GPT2LMHeadModel(config)
            loop = Loop(model, sgd(model), device="cpu", **setting)
            loop.memory(batches[0])
            loop.tune(batches, steps=20, progress=False)
            loop.fit(batches, save=tmp_path / str(len(setting)), dry_run=1, progress=False)
            assert len(model(**batches[0]).hidden_states) == 3


def test_the_device_of_the_environment(task, sgd, monkeypatch) -> None:
    monkeypatch.setenv("HOTLOOP_DEVICE", "cuda:99")
    model = task.model()
    with pytest.raises(DeviceUnavailable, match="HOTLOOP_DEVICE"):
        Loop(model, sgd(model), nn.CrossEntropyLoss())


def test_a_run_that_would_change_nothing_is_refused(task, sgd) -> None:
    with pytest.raises(BadArgument, match="none of the model's parameters"):
        Loop(task.model(), sgd(task.model()), nn.CrossEntropyLoss(), device="cpu")
    frozen = task.model().requires_grad_(False)
    with pytest.raises(BadArgument, match="frozen"):
        Loop(frozen, sgd(frozen), nn.CrossEntropyLoss(), device="cpu")
    with pytest.raises(BadArgument, match="the model is a NoneType"):
        Loop(None, sgd(task.model()), nn.CrossEntropyLoss(), device="cpu")


def test_a_batch_that_does_not_fit_is_named(task, sgd) -> None:
    loop = loop_of(task, sgd)
    good, bad = (torch.zeros(2, 6), torch.zeros(2).long()), (torch.zeros(2, 5), torch.zeros(2).long())
    before = [p.clone() for p in loop.model.parameters()]
    with pytest.raises(BatchError, match=r"batch 2 of epoch 1 cannot be used: layer 0, Linear.*must be 6"):
        with_loop(loop, [good, good, bad])
    assert loop.steps == 2
    assert not all(torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))


def test_plan_plain_turns_everything_off(task, sgd) -> None:
    loop = loop_of(task, sgd, plan="plain")
    with_loop(loop, task.loader(), epochs=1)
    assert loop._core.data.stream.kind == "direct"
    with pytest.raises(BadArgument, match="plain"):
        loop_of(task, sgd, plan="fast")


def test_the_step_of_a_subclass_runs_once_for_each_batch(task, sgd, monkeypatch) -> None:
    monkeypatch.setattr("hotloop.tune.course.WORTH_ON_CPU", 1)  # so that the tuner watches some of them

    class Counting(Loop):
        calls = 0

        def step(self, batch: Any) -> torch.Tensor:
            self.calls += 1
            return super().step(batch)

    model = task.model()
    loop = Counting(model, sgd(model), nn.CrossEntropyLoss(), device="cpu")
    loop.fit([(task.inputs, task.targets)] * 150, progress=False)
    assert loop.calls == loop.steps == 150


# ---- on a real GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_on_cuda(task, precision) -> None:
    losses = {}
    for kind in ("fp32", precision):
        model = task.model()
        loop = Loop(model, adam(model), nn.CrossEntropyLoss(), device="cuda", precision=kind)
        losses[kind] = with_loop(loop, task.loader(), epochs=8)
    torch.testing.assert_close(losses[precision], losses["fp32"], rtol=0.05, atol=0.02)
    assert losses[precision][-1] < 0.8 * losses[precision][0]


@pytest.mark.gpu
def test_bf16_is_autocast_as_by_hand_on_cuda(task, sgd) -> None:
    plain, ours = task.model().cuda(), task.model()
    expected = by_hand(plain, sgd(plain), task.loader(), device="cuda", dtype=torch.bfloat16)
    loop = Loop(ours, sgd(ours), nn.CrossEntropyLoss(), device="cuda", precision="bf16")
    torch.testing.assert_close(with_loop(loop, task.loader()), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_waits_in_a_step(task, no_waits, precision) -> None:
    model = task.model(dropout=0.1)
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    loop = Loop(
        model, optimizer, nn.CrossEntropyLoss(), device="cuda", precision=precision, clip_norm=1.0, scheduler=scheduler
    )
    batches = [hotloop.move(batch, "cuda") for batch in task.loader()]
    for batch in batches:
        loop.step(batch)
    with no_waits():
        for _ in range(20):
            for batch in batches:
                loop.step(batch)
    assert loop.steps == 21 * len(batches)


@pytest.mark.gpu
def test_a_mismatch_inside_a_model_is_explained_by_the_loop(sgd) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.ones(3)
            return self.body(x) + noise

    model = Net()
    loop = Loop(model, sgd(model), nn.MSELoss(), device="cuda")
    with pytest.raises(DeviceMismatch) as caught:
        loop.step((torch.ones(2, 3), torch.ones(2, 3)))
    text = str(caught.value)
    assert "noise = torch.ones(3)" in text
    assert "return self.body(x) + noise" in text
    assert 'noise = noise.to("cuda:0")' in text
