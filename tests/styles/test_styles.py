"""Trainings in the styles that people write end with the weights of their twins in plain PyTorch."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.errors import BadArgument, BatchError

from ..thorough import dealt
from . import batches, losses, models, runs  # noqa: F401  # each registers its styles
from .style import STYLES, Style, pairs, sgd


def left_behind(trained: Any, path: str = "") -> dict[str, Any]:
    """Copies of the tensors and numbers of modules, optimizers and whatever else a style has trained."""
    if hasattr(trained, "state_dict"):
        return left_behind(trained.state_dict(), path)
    if isinstance(trained, Tensor):
        return {path: trained.detach().clone()}
    if isinstance(trained, dict | list | tuple):
        pairs = trained.items() if isinstance(trained, dict) else enumerate(trained)
        return {name: found for key, each in pairs for name, found in left_behind(each, f"{path}/{key}").items()}
    return {path: trained}


def trained_by(style: Style, which: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What there was before, and what there is afterwards."""
    torch.manual_seed(0)
    pair = style.build()
    before = left_behind(pair[2])
    pair[which]()
    return before, left_behind(pair[2]) | {"rng state": torch.get_rng_state()}


def differences(a: dict[str, Any], b: dict[str, Any], *, close: bool) -> list[str]:
    return sorted(name for name in a.keys() | b.keys() if not equal(a.get(name), b.get(name), close=close))


def equal(a: Any, b: Any, *, close: bool) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return bool(a == b)
    return torch.allclose(a, b, rtol=1e-5, atol=1e-7) if close and a.is_floating_point() else torch.equal(a, b)


@pytest.mark.usefixtures("nothing_rounds")
@pytest.mark.parametrize(
    ("style", "plan"), dealt(STYLES, ["auto", "plain"]), ids=lambda each: getattr(each, "name", each)
)
def test_it_ends_with_the_weights_of_its_twin(style: Style, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, twin = trained_by(style, 1)
    assert differences(begun, twin, close=True) != ["rng state"], "something was trained"
    with monkeypatch.context() as patch:
        patch.setattr(hotloop, "Loop", partial(hotloop.Loop, plan=plan))
        before, ours = trained_by(style, 0)
    assert not differences(before, begun, close=False), "both begin alike"
    assert not differences(ours, twin, close=style.close)


def test_there_are_more_than_forty() -> None:
    assert len({style.name for style in STYLES}) == len(STYLES) > 40


# Around a training


def test_metrics_and_predictions_are_of_the_logits() -> None:
    torch.manual_seed(0)
    model, given = models.Classifier(models.Output), pairs()
    loop = hotloop.Loop(model, sgd(model), nn.CrossEntropyLoss())
    scores = loop.evaluate(given, {"accuracy": hotloop.metrics.accuracy, "top2": hotloop.metrics.top_k(2)})
    x, y = (torch.cat(each) for each in zip(*given, strict=True))
    assert scores["accuracy"] == pytest.approx(float((model.layers(x).argmax(1) == y).float().mean()))
    assert scores["top2"] == 1.0
    assert torch.equal(loop.predict(given), torch.cat([model.layers(x) for x, _ in given]).detach())


@pytest.mark.parametrize(
    "returned",
    [lambda logits, loss: (logits, loss), lambda logits, loss: {"logits": logits, "loss": loss}, models.Output],
    ids=["tuple", "dict", "dataclass"],
)
def test_a_model_with_its_own_loss_is_evaluated(returned: Any) -> None:
    model, given = models.Classifier(returned), pairs()
    scores = hotloop.Loop(model, sgd(model)).evaluate(given, {"accuracy": hotloop.metrics.accuracy})
    x, y = (torch.cat(each) for each in zip(*given, strict=True))
    assert scores["loss"] == pytest.approx(nn.functional.cross_entropy(model.layers(x), y).item())
    assert scores["accuracy"] == pytest.approx((model.layers(x).argmax(1) == y).double().mean().item())


def test_a_model_without_a_loss_is_refused_with_the_call_that_was_tried() -> None:
    model = models.Classifier(lambda logits, loss: (logits, logits))
    with pytest.raises(BadArgument, match=r"model\(\*batch\)") as error:
        hotloop.Loop(model, sgd(model)).fit(pairs())
    assert "objective=lambda model, batch" in str(error.value)


def test_metrics_of_what_has_no_logits_are_refused() -> None:
    with pytest.raises(BadArgument, match="no logits were found"):
        hotloop.metrics.accuracy({"scores": torch.zeros(2, 2)}, torch.zeros(2))


def test_an_objective_for_other_arguments_is_refused_at_once() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(BadArgument, match=r"the whole batch.*'y'"):
        hotloop.Loop(model, sgd(model), objective=lambda model, x, y: model(x).sum())


def test_an_objective_that_returns_outputs_too_is_refused() -> None:
    model = nn.Linear(3, 2)
    loop = hotloop.Loop(model, sgd(model), objective=lambda model, batch: (model(batch[0]).sum(), model(batch[0])))
    with pytest.raises(BadArgument, match="is not the number of items"):
        loop.fit(pairs())


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layer(a + b)


@pytest.mark.parametrize(
    ("batch", "fix"),
    [
        (lambda x, y: ((x, x), y), r"model\(\*batch\[0\]\)"),
        (lambda x, y: ({"a": x, "b": x}, y), r"model\(\*\*batch\[0\]\)"),
        (
            lambda x, y: {"a": x, "b": x, "labels": y},
            r"given a, b, labels[\s\S]*model\(a=batch\['a'\], b=batch\['b'\]\)",
        ),
        (lambda x, y: (x.numpy(), x.numpy(), y), r"NumPy array[\s\S]*torch.from_numpy"),
    ],
    ids=["inputs in a tuple", "inputs in a dict", "labels by name", "numpy"],
)
def test_batches_that_need_an_objective_are_refused_with_the_call_to_write(batch: Any, fix: str) -> None:
    model = TwoInputs()
    with pytest.raises(BatchError, match=fix):
        hotloop.Loop(model, sgd(model), nn.CrossEntropyLoss()).fit([batch(x, y) for x, y in pairs()])
