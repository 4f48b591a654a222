"""`evaluate`: exact over uneven batches, nothing changed, one wait."""

import pytest
import torch
from torch import nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

from hotloop import evaluate
from hotloop.errors import BadArgument, EmptyLoader


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.argmax(1) == target


class Right(Metric):
    """A metric of torchmetrics whose update does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", torch.zeros(()))
        self.add_state("seen", torch.zeros(()))

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.right += accuracy(output, target).sum()
        self.seen += len(target)

    def compute(self) -> torch.Tensor:
        return self.right / self.seen


def test_metrics_are_those_of_the_whole_set(task) -> None:
    model = task.model()
    whole_output = model(task.inputs)
    expected = accuracy(whole_output, task.targets).float().mean().item()
    metrics = {
        "per_item": accuracy,
        "mean": lambda o, t: accuracy(o, t).float().mean(),
        "number": lambda o, t: accuracy(o, t).float().mean().item(),
        "torchmetrics": MulticlassAccuracy(3, average="micro"),
        "own": Right(),
        "several": MulticlassRecall(3, average="none"),
    }
    result = evaluate(model, task.loader(16), metrics, loss=nn.CrossEntropyLoss())
    for name in ("per_item", "mean", "number", "torchmetrics", "own"):
        assert result[name] == pytest.approx(expected, abs=1e-6), name
    assert result["loss"] == pytest.approx(nn.functional.cross_entropy(whole_output, task.targets).item(), rel=1e-6)
    assert {"several[0]", "several[1]", "several[2]"} <= set(result)


def test_a_summed_loss_is_still_reported_per_item(task) -> None:
    mean = evaluate(task.model(), task.loader(), loss=nn.CrossEntropyLoss())
    summed = evaluate(task.model(), task.loader(), loss=nn.CrossEntropyLoss(reduction="sum"))
    assert summed["loss"] == pytest.approx(mean["loss"], rel=1e-6)


def test_an_objective_with_named_losses(task) -> None:
    def objective(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        output = model(batch[0])
        return {"fit": nn.functional.cross_entropy(output, batch[1]), "size": output.square().mean()}

    result = evaluate(task.model(), task.loader(), objective=objective)
    assert result["loss"] == pytest.approx(result["fit"] + result["size"])


def test_no_gradient_eval_mode_and_every_layer_back_as_it_was(task) -> None:
    model = task.model(dropout=0.5)
    model[0].eval()  # frozen by the person
    seen = []

    def look(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append((model[2].training, output.requires_grad, torch.is_inference_mode_enabled()))
        return accuracy(output, target)

    modes = [m.training for m in model.modules()]
    first = evaluate(model, task.loader(), {"a": look})
    assert set(seen) == {(False, False, True)}
    assert [m.training for m in model.modules()] == modes
    assert evaluate(model, task.loader(), {"a": look}) == first, "dropout is off"


def test_modes_come_back_after_a_failure_too(task) -> None:
    model = task.model()

    def fail(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        evaluate(model, task.loader(), {"fail": fail})
    assert model.training


class Made(torch.utils.data.Dataset):
    """Items that are made when they are asked for."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((6,), float(i)), torch.tensor(0)


def test_workers_that_persist_serve_every_evaluation(task) -> None:
    loader = torch.utils.data.DataLoader(Made(), 4, num_workers=1, persistent_workers=True)
    evaluate(task.model(), loader, {"a": accuracy})
    workers = loader._iterator._workers
    evaluate(task.model(), loader, {"a": accuracy})
    assert loader._iterator._workers is workers


def test_bad_calls(task) -> None:
    with pytest.raises(BadArgument, match="nothing to evaluate"):
        evaluate(task.model(), task.loader())
    with pytest.raises(BadArgument, match="metric 'a' cannot be called"):
        evaluate(task.model(), task.loader(), {"a": 3})
    with pytest.raises(EmptyLoader):
        evaluate(task.model(), [], {"a": accuracy})


def test_a_torchmetric_starts_from_nothing_each_time(task) -> None:
    metric = {"a": MulticlassAccuracy(3)}
    assert evaluate(task.model(), task.loader(), metric) == evaluate(task.model(), task.loader(), metric)


@pytest.mark.gpu
def test_one_wait_at_the_end(task) -> None:
    model = task.model().cuda()
    loader = [(x.cuda(), y.cuda()) for x, y in task.loader()]
    metrics = {"a": accuracy, "b": Right()}  # many metrics of torchmetrics wait in `update`, as bincount does
    evaluate(model, loader, metrics, loss=nn.CrossEntropyLoss())
    with torch.profiler.profile(acc_events=True) as profile:
        evaluate(model, loader, metrics, loss=nn.CrossEntropyLoss())
    copies = [e for e in profile.events() if "Memcpy DtoH" in e.name]
    assert len(copies) == 1
