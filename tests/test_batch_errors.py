"""A batch that cannot be used: which layer, which shape, what it expects."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop import DeviceMismatch
from hotloop.errors import BadArgument, BatchError
from hotloop.objective.batch_errors import attempt


def message(model: nn.Module, *inputs: Any, call: Callable[[], object] | None = None) -> str:
    with pytest.raises(BatchError) as caught:
        attempt(call or (lambda: model(*inputs)), model, inputs, "batch 3 of epoch 1")
    return str(caught.value)


LAYERS: dict[str, tuple[nn.Module, torch.Tensor, str]] = {
    "linear": (nn.Linear(3, 2), torch.zeros(5, 7), "the last size must be 3"),
    "conv": (nn.Conv2d(3, 8, 3), torch.zeros(2, 1, 9, 9), "dimension 1 (channels) must be 3"),
    "batchnorm": (nn.BatchNorm1d(4), torch.zeros(5, 7), "dimension 1 (features) must be 4"),
    "layernorm": (nn.LayerNorm(4), torch.zeros(5, 7), "the last sizes must be (4,)"),
    "lstm": (nn.LSTM(4, 2), torch.zeros(5, 2, 7), "the last size must be 4"),
    "embedding": (nn.Embedding(10, 2), torch.tensor([10]), "its indices go from 0 to 9"),
    "images": (nn.Linear(3, 2), torch.zeros(5, 3, dtype=torch.uint8), "convert the images: x = x.float() / 255"),
    "images for a conv": (
        nn.Conv2d(3, 8, 3),
        torch.zeros(2, 3, 9, 9, dtype=torch.uint8),
        "was given input (2, 3, 9, 9) uint8; its weights are float32\n",
    ),
    "whole numbers": (nn.Linear(3, 2), torch.zeros(5, 3, dtype=torch.long), "x = x.to(torch.float32)"),
    "dtype": (nn.Linear(3, 2), torch.zeros(5, 3, dtype=torch.float64), "its weights are float32"),
}


@pytest.mark.parametrize(("layer", "batch", "says"), LAYERS.values(), ids=LAYERS)
def test_the_layer_is_named_with_what_it_expects(layer: nn.Module, batch: torch.Tensor, says: str) -> None:
    text = message(nn.Sequential(nn.Identity(), layer), batch)
    assert text.startswith(f"batch 3 of epoch 1 cannot be used: layer 1, {type(layer).__name__}(")
    assert says in text
    assert f"batch[0] {tuple(batch.shape)}" in text
    assert "torch says:" in text
    assert "\n  fix: " in text


def test_one_item_is_too_few_for_batch_normalisation() -> None:
    text = message(nn.Sequential(nn.BatchNorm1d(4)), torch.zeros(1, 4))
    assert "batch normalisation needs more than one item in training mode" in text
    assert "drop_last=True" in text.partition("fix: ")[2]
    assert "must be 4" not in text


def test_a_loss_without_a_gradient() -> None:
    def fit(*, detach: bool = False) -> None:
        def objective(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).mean().detach() if detach else model(batch).mean()

        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loop = hotloop.Loop(model, optimizer, objective=objective, device="cpu", plan="plain")
        model.requires_grad_(not frozen)
        loop.fit([torch.ones(2, 3)], progress=False, monitor=False)

    model, frozen = nn.Linear(3, 2), False
    with pytest.raises(BadArgument, match=r"the loss of batch 0 of epoch 1 has no gradient: it was detached"):
        fit(detach=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(BadArgument, match="gradients are switched off"):
            fit()
    frozen = True
    with pytest.raises(BadArgument, match=r"all parameters of the model are frozen\n  fix: .*requires_grad_"):
        fit()


@pytest.mark.parametrize("keeps", [False, True])
def test_a_graph_that_is_used_twice(keeps: bool) -> None:
    kept = [torch.ones(2, 2)]

    def objective(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        kept[0] = torch.tanh(model(batch) * (kept[0] if keeps else 1))
        loss = kept[0].mean()
        if not keeps:
            loss.backward()
        return loss

    model = nn.Linear(3, 2)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), objective=objective, device="cpu")
    with pytest.raises(BadArgument, match=r"the graph of the loss of batch . of epoch 1 was freed[\s\S]*fix: .*detach"):
        loop.fit([torch.ones(2, 3)] * 2, progress=False, monitor=False)


def test_a_gradient_of_the_persons_own_stays_their_error() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match=r"^element 0 of tensors does not require grad"):
        attempt(lambda: torch.zeros(()).backward(), model, (), "batch 0")


def test_a_line_of_the_models_own() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.ones(3, 3)

    assert "the model, Own, was given x (2, 4) float32" in message(Own(), torch.zeros(2, 4))


def test_too_many_inputs() -> None:
    text = message(nn.Linear(2, 2), torch.ones(2), torch.ones(2))
    assert "takes 2 positional arguments but 3 were given" in text
    assert "the model, Linear, takes (input) and was given 2 inputs" in text
    assert "objective=lambda model, batch: … model(batch[0]) …" in text


def test_a_model_that_wants_the_target_too() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.layer(x, y))

    assert "the model, Pair, takes (x, y) and was given 1 input" in message(Pair(), torch.ones(4, 2))
    text = message(Pair(), torch.ones(4, 2), torch.ones(4))
    assert "layer layer, Linear, takes (input) and was given 2 inputs" in text
    triplet = nn.TripletMarginLoss()
    text = message(nn.Identity(), call=lambda: triplet(torch.ones(4), torch.ones(4)))
    assert "the loss, TripletMarginLoss, takes (anchor, positive, negative) and was given 2 inputs" in text


LOSSES: dict[str, tuple[nn.Module, torch.Tensor, torch.Tensor, str]] = {
    "whole numbers": (nn.BCEWithLogitsLoss(), torch.zeros(8, 1), torch.ones(8, 1).long(), "target.float()"),
    "a last size of 1": (nn.BCEWithLogitsLoss(), torch.zeros(8, 1), torch.ones(8), "output.squeeze(-1)"),
    "no probabilities": (nn.BCELoss(), torch.full((8,), 3.0), torch.ones(8), "use nn.BCEWithLogitsLoss()"),
    "classes as floats": (nn.CrossEntropyLoss(), torch.zeros(8, 3), torch.ones(8), "target.long()"),
    "classes in few bits": (nn.CrossEntropyLoss(), torch.zeros(8, 3), torch.ones(8).int(), "target.long()"),
    "classes as truths": (nn.CrossEntropyLoss(), torch.zeros(8, 2), torch.ones(8).bool(), "target.long()"),
    "classes last": (nn.CrossEntropyLoss(), torch.zeros(8, 5, 9), torch.ones(8, 5).long() * 8, "output.movedim(-1, 1)"),
    "classes of pixels last": (
        nn.CrossEntropyLoss(),
        torch.zeros(2, 4, 5, 3),
        torch.ones(2, 4, 5).long(),
        "output.movedim(-1, 1)",
    ),
    "classes in a column": (nn.CrossEntropyLoss(), torch.zeros(8, 3), torch.ones(8, 1).long(), "target.squeeze(-1)"),
    "a single class": (
        nn.CrossEntropyLoss(),
        torch.zeros(8, 1),
        torch.ones(8).long(),
        "the targets go from 1 to 1, and the output has 1 class: 0 to 0",
    ),
    "a target that is no class": (
        nn.CrossEntropyLoss(),
        torch.zeros(4, 3),
        torch.tensor([0, 1, 2, 3]),
        "the targets go from 0 to 3, and the output has 3 classes: 0 to 2",
    ),
    "another length": (
        nn.CrossEntropyLoss(),
        torch.zeros(4, 3),
        torch.zeros(5, dtype=torch.long),
        "input (4, 3) float32 and target (5,) int64",
    ),
}


@pytest.mark.parametrize(("loss", "output", "target", "fix"), LOSSES.values(), ids=LOSSES)
def test_the_loss_is_named_with_what_to_do(
    loss: nn.Module, output: torch.Tensor, target: torch.Tensor, fix: str
) -> None:
    text = message(nn.Identity(), output, target, call=lambda: loss(output, target))
    assert fix in text
    assert "1 classes" not in text


def test_mixed_devices_are_explained_by_the_golden_rule() -> None:
    model = nn.Linear(3, 2, device="meta")
    with pytest.raises(DeviceMismatch, match="parameter weight"):
        attempt(lambda: nn.functional.mse_loss(model.weight, torch.zeros(2, 3)), model, (), "batch 0")


def test_errors_that_are_not_about_the_batch_stay_as_they_are() -> None:
    class Strict(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0: raise ValueError("mine")  # noqa: E701  # fmt: skip
            return x

    model = Strict()
    with pytest.raises(ValueError, match=r"^mine$") as caught:
        attempt(lambda: model(torch.ones(1)), model, (), "batch 0")
    assert caught.value.__cause__ is None
    with pytest.raises(RuntimeError, match="shapes cannot"):
        attempt(lambda: torch.ones(2, 3) @ torch.ones(2, 3), model, (), "batch 0")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), x


class WithLoss(Recurrent):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return self.layer(x), None


IMAGES = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3))
SOUND = nn.Sequential(nn.Conv1d(4, 2, 3), nn.Flatten(), nn.Linear(28, 3))
ROWS, CLASSES = torch.zeros(8, 4), torch.zeros(8).long()
# A model, the loss, input, target, and the fix in full.
STEPS: dict[str, tuple[nn.Module, Any, torch.Tensor, torch.Tensor, str]] = {
    "no loss for classes": (nn.Linear(4, 3), None, ROWS, CLASSES, "loss=nn.CrossEntropyLoss()"),
    "no loss for values": (nn.Linear(4, 3), None, ROWS, torch.zeros(8, 3), "loss=nn.MSELoss()"),
    "no loss for images": (IMAGES, None, torch.zeros(2, 3, 8, 8), CLASSES[:2], "loss=nn.CrossEntropyLoss()"),
    "no loss, flattened": (
        nn.Sequential(nn.Flatten(), nn.Linear(4, 3)),
        None,
        ROWS,
        CLASSES,
        "loss=nn.CrossEntropyLoss()",
    ),
    "channels last": (
        IMAGES,
        nn.CrossEntropyLoss(),
        torch.zeros(2, 8, 8, 3),
        CLASSES[:2],
        "put the channels first: x = x.permute(0, 3, 1, 2)",
    ),
    "channels last, bytes": (
        IMAGES,
        nn.CrossEntropyLoss(),
        torch.zeros(2, 8, 8, 3, dtype=torch.uint8),
        CLASSES[:2],
        "x = x.permute(0, 3, 1, 2).float() / 255",
    ),
    "channels last, sound": (
        SOUND,
        nn.CrossEntropyLoss(),
        torch.zeros(2, 16, 4),
        CLASSES[:2],
        "x = x.permute(0, 2, 1)",
    ),
    "a last size of 1": (
        nn.Linear(4, 1),
        nn.BCEWithLogitsLoss(),
        ROWS,
        torch.ones(8),
        "loss=lambda output, target: criterion(output.squeeze(-1), target)",
    ),
    "broadcast": (
        nn.Linear(4, 1),
        nn.MSELoss(),
        ROWS,
        torch.ones(8),
        "loss=lambda output, target: criterion(output.squeeze(-1), target)",
    ),
    "whole numbers": (
        nn.Linear(4, 1),
        nn.BCEWithLogitsLoss(),
        ROWS,
        CLASSES[:, None],
        "loss=lambda output, target: criterion(output, target.float())",
    ),
    "one-hot": (
        nn.Linear(4, 3),
        nn.CrossEntropyLoss(),
        ROWS,
        torch.eye(3)[CLASSES].long(),
        "loss=lambda output, target: criterion(output, target.argmax(1))",
    ),
    "two outputs": (
        Recurrent(),
        nn.MSELoss(),
        ROWS,
        torch.zeros(8, 3),
        "give the loss the first: loss=lambda output, target: criterion(output[0], target)",
    ),
    "logits and loss": (WithLoss(), nn.CrossEntropyLoss(), ROWS, CLASSES, "leave loss= out if the model"),
    "a function of the person's": (
        Recurrent(),
        lambda output, target: 2 * nn.functional.cross_entropy(output, target),
        ROWS,
        CLASSES,
        "give the loss the first: output[0]",
    ),
}


@pytest.mark.parametrize(("model", "loss", "x", "y", "fix"), STEPS.values(), ids=STEPS)
def test_a_loop_says_what_to_write(model: nn.Module, loss: Any, x: torch.Tensor, y: torch.Tensor, fix: str) -> None:
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), loss, device="cpu")
    with pytest.raises(BatchError) as caught:
        loop.step((x, y))
    said = str(caught.value).partition("fix: ")[2]
    assert fix in said
    assert "convert the input" not in said
    assert "before the loss" not in said


def test_a_model_that_takes_the_batch_apart_keeps_its_own_errors() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return (self.layer(x) - y).square().mean()

    model = Own()
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), device="cpu")
    with pytest.raises(BatchError, match="the last size must be 4"):
        loop.step([torch.zeros(8, 5), torch.zeros(8, 1)])
