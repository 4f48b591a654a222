"""`Loop`: the same training as the loop written by hand, on any device, with help when something does not fit."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import hotloop
from hotloop import DeviceMismatch, Loop
from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.errors import BadArgument, BatchError, DeviceUnavailable, EmptyLoader, PlanWarning

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "groups": lambda m: torch.optim.AdamW(decayed_and_others(m), lr=0.01),
}


def decayed_and_others(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and then biases, which is not the order of the model."""
    weights, others = ([p for p in model.parameters() if (p.dim() > 1) == kind] for kind in (True, False))
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def by_hand(model, optimizer, loader, *, epochs=2, clip=None, scheduler=None, device="cpu", dtype=None):
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
            if scheduler:
                scheduler.step()
            losses.append(loss.item())
    return losses


def with_loop(loop: Loop, loader, *, epochs=2) -> list[float]:
    return [loop.step(batch).item() for _ in range(epochs) for batch in loop.batches(loader)]


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_same_training_to_the_bit(task, build, clip, dropout) -> None:
    plain, ours = task.model(dropout=dropout), task.model(dropout=dropout)
    optimizers = build(plain), build(ours)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 14) for o in optimizers]
    torch.manual_seed(4)
    expected = by_hand(plain, optimizers[0], task.loader(), clip=clip, scheduler=schedulers[0])
    torch.manual_seed(4)
    loop = Loop(ours, optimizers[1], nn.CrossEntropyLoss(), device="cpu", clip_norm=clip, scheduler=schedulers[1])
    assert with_loop(loop, task.loader()) == expected
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
    assert loop.steps == len(expected)


def test_fit_is_the_same_training_too(task, sgd) -> None:
    plain, ours = task.model(), task.model()
    by_hand(plain, sgd(plain), task.loader())
    Loop(ours, sgd(ours), nn.CrossEntropyLoss(), device="cpu").fit(task.loader(), epochs=2, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns(task, precision) -> None:
    model = task.model()
    loop = Loop(model, OPTIMIZERS["adam"](model), nn.CrossEntropyLoss(), device="cpu", precision=precision)
    losses = with_loop(loop, task.loader(), epochs=8)
    assert sum(losses[-7:]) < 0.7 * sum(losses[:7])
    assert next(model.parameters()).dtype == torch.float32, "the weights stay in fp32"


def test_bf16_is_autocast_as_by_hand(task, sgd) -> None:
    plain, ours = task.model(), task.model()
    expected = by_hand(plain, sgd(plain), task.loader(), dtype=torch.bfloat16)
    loop = Loop(ours, sgd(ours), nn.CrossEntropyLoss(), device="cpu", precision="bf16")
    assert with_loop(loop, task.loader()) == expected


def test_a_run_begins_in_fp32_unless_asked(task, sgd) -> None:
    model = task.model()
    loop = Loop(model, sgd(model), nn.CrossEntropyLoss(), device="cpu")
    assert loop.plan.precision == "fp32"


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


def test_step_takes_batches_that_were_not_moved(task, sgd) -> None:
    model = task.model()
    loop = Loop(model, sgd(model), nn.CrossEntropyLoss(), device="cpu")
    before = loop.step((task.inputs, task.targets))
    assert not before.requires_grad
    assert loop.step((task.inputs, task.targets)) < before


def test_evaluate_by_the_loop(task, sgd) -> None:
    model = task.model()
    loop = Loop(model, sgd(model), nn.CrossEntropyLoss(), device="cpu")
    result = loop.evaluate(task.loader(), {"accuracy": lambda o, t: o.argmax(1) == t})
    assert set(result) == {"loss", "accuracy"}
    assert result["loss"] == pytest.approx(F.cross_entropy(model(task.inputs), task.targets).item(), rel=1e-6)


def test_hooks_that_transformers_installs_in_the_first_call_are_installed_once(tmp_path) -> None:
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
            loop = Loop(model, OPTIMIZERS["sgd"](model), device="cpu", **setting)
            loop.memory(batches[0])
            loop.tune(batches, steps=20, progress=False)
            loop.fit(batches, save=tmp_path / str(len(setting)), dry_run=1, progress=False)
            assert len(model(**batches[0]).hidden_states) == 3


def test_a_hugging_face_model_needs_neither_loss_nor_objective() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    ids = torch.randint(0, 30, (8, 6), generator=torch.Generator().manual_seed(0))
    batch = transformers.BatchEncoding({"input_ids": ids, "labels": ids[:, 0] % 2})
    loop = Loop(model, torch.optim.Adam(model.parameters(), 1e-3), device="cpu")
    losses = [loop.step(batch).item() for _ in range(20)]
    assert losses[-1] < losses[0]
    accuracy = {"accuracy": lambda logits, labels: logits.argmax(1) == labels}
    assert set(loop.evaluate([batch], accuracy)) == {"loss", "accuracy"}


def test_data_parallel_is_accepted(task, sgd) -> None:
    model = nn.DataParallel(task.model())
    loop = Loop(model, sgd(model), nn.CrossEntropyLoss(), device="cpu")
    assert len(with_loop(loop, task.loader())) == 14


def test_the_device_of_the_environment(task, sgd, monkeypatch) -> None:
    monkeypatch.setenv("HOTLOOP_DEVICE", "cuda:99")
    model = task.model()
    with pytest.raises(DeviceUnavailable, match="HOTLOOP_DEVICE"):
        Loop(model, sgd(model), nn.CrossEntropyLoss())


BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "loss and objective": ({"objective": lambda m, b: b}, "give one"),
    "precision": ({"precision": "fp8"}, "fp32, bf16, fp16"),
    "accumulate": ({"accumulate": 0}, "at least 1"),
    "clip": ({"clip_norm": -1.0}, "above 0"),
    "schedule": ({"schedule": "batch"}, '"step"'),
}


@pytest.mark.parametrize(("options", "says"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_arguments_that_cannot_be_meant(task, sgd, options, says) -> None:
    model = task.model()
    with pytest.raises(BadArgument, match=says):
        Loop(model, sgd(model), nn.CrossEntropyLoss(), device="cpu", **options)


def test_what_is_no_optimizer_is_refused(task) -> None:
    for wrong in ([], task.model().parameters(), "adam"):
        with pytest.raises(BadArgument, match="optimizer"):
            Loop(task.model(), wrong, nn.CrossEntropyLoss(), device="cpu")  # type: ignore[arg-type]


def test_a_run_that_would_change_nothing_is_refused(task, sgd) -> None:
    with pytest.raises(BadArgument, match="none of the model's parameters"):
        Loop(task.model(), sgd(task.model()), nn.CrossEntropyLoss(), device="cpu")
    frozen = task.model().requires_grad_(False)
    with pytest.raises(BadArgument, match="frozen"):
        Loop(frozen, sgd(frozen), nn.CrossEntropyLoss(), device="cpu")
    with pytest.raises(BadArgument, match="the model is a NoneType"):
        Loop(None, sgd(task.model()), nn.CrossEntropyLoss(), device="cpu")  # type: ignore[arg-type]


def test_a_batch_that_does_not_fit_is_named(task, sgd) -> None:
    model = task.model()
    loop = Loop(model, sgd(model), nn.CrossEntropyLoss(), device="cpu")
    good, bad = (torch.zeros(2, 6), torch.zeros(2).long()), (torch.zeros(2, 5), torch.zeros(2).long())
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(BatchError, match=r"batch 2 of epoch 1 cannot be used: layer 0, Linear.*must be 6"):
        with_loop(loop, [good, good, bad])
    assert loop.steps == 2
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_empty_loader_is_told(task, sgd) -> None:
    model = task.model()
    loop = Loop(model, sgd(model), nn.CrossEntropyLoss(), device="cpu")
    with pytest.raises(EmptyLoader, match="list is empty"):
        list(loop.batches([]))


class Squares(torch.utils.data.Dataset):
    """Items that are made when they are asked for, so that they cannot live on the device."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((6,), float(i)), torch.tensor(i % 3)


def test_workers_that_persist_are_kept_between_epochs(task, sgd) -> None:
    model = task.model()
    loop = Loop(model, sgd(model), nn.CrossEntropyLoss(), device="cpu")
    loader = DataLoader(Squares(), 4, num_workers=1, persistent_workers=True)
    with_loop(loop, loader, epochs=1)
    workers = loop._core.stream._tap.loader._iterator._workers  # type: ignore[union-attr]
    with_loop(loop, loader, epochs=1)
    assert loop._core.stream._tap.loader._iterator._workers is workers  # type: ignore[union-attr]


def test_a_transform_on_the_device_sees_whole_batches(task, sgd) -> None:
    shapes = []

    def double(batch):
        shapes.append(tuple(batch[0].shape))
        return [batch[0] * 2, batch[1]]

    losses = []
    for transform, inputs in ((double, task.inputs), (None, task.inputs * 2)):
        model = task.model()
        loop = Loop(model, sgd(model), nn.CrossEntropyLoss(), device="cpu")
        report = loop.fit(type(task)(inputs, task.targets).loader(), device_transform=transform, progress=False)
        losses.append(report.curve)
    assert losses[0] == losses[1]
    assert shapes[0] == (16, 6)


def test_plan_plain_turns_everything_off(task, sgd) -> None:
    model = task.model()
    loop = Loop(model, sgd(model), nn.CrossEntropyLoss(), device="cpu", plan="plain")
    with_loop(loop, task.loader(), epochs=1)
    assert loop._core.stream.kind == "direct"
    with pytest.raises(BadArgument, match="plain"):
        Loop(model, sgd(model), nn.CrossEntropyLoss(), device="cpu", plan="fast")


def test_the_step_of_a_subclass_runs_once_for_each_batch(task, sgd, monkeypatch) -> None:
    monkeypatch.setattr("hotloop.tune.tuner.WORTH_ON_CPU", 1)  # so that the tuner watches some of them

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
@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_same_losses_as_by_hand_on_cuda(task, build) -> None:
    plain, ours = task.model().cuda(), task.model()
    expected = by_hand(plain, build(plain), task.loader(), device="cuda")
    loop = Loop(ours, build(ours), nn.CrossEntropyLoss(), device="cuda")
    torch.testing.assert_close(with_loop(loop, task.loader()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_cuda_agrees_with_the_cpu(task, sgd) -> None:
    on_cpu, on_gpu = task.model(), task.model()
    expected = by_hand(on_cpu, sgd(on_cpu), task.loader())
    loop = Loop(on_gpu, sgd(on_gpu), nn.CrossEntropyLoss(), device="cuda")
    torch.testing.assert_close(with_loop(loop, task.loader()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_on_cuda(task, precision) -> None:
    losses = {}
    for kind in ("fp32", precision):
        model = task.model()
        loop = Loop(model, OPTIMIZERS["adam"](model), nn.CrossEntropyLoss(), device="cuda", precision=kind)
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
def test_an_optimizer_built_before_the_loop_moves_the_model(task) -> None:
    plain, ours = task.model(), task.model()
    optimizers = OPTIMIZERS["adam"](plain), OPTIMIZERS["adam"](ours)
    for model, optimizer in zip((plain, ours), optimizers, strict=True):
        by_hand(model, optimizer, task.loader(), epochs=1)  # on the CPU: the optimizer now has state there
    expected = by_hand(plain, optimizers[0], task.loader(), epochs=1)
    loop = Loop(ours, optimizers[1], nn.CrossEntropyLoss(), device="cuda")
    torch.testing.assert_close(with_loop(loop, task.loader(), epochs=1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nothing_waits_in_a_step(task, no_waits, precision) -> None:
    model = task.model(dropout=0.1)
    optimizer = OPTIMIZERS["adam"](model)
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
