"""`evaluate`: exact over uneven batches, nothing changed, one wait."""

import gc
import itertools
import math
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop import evaluate
from hotloop.errors import BadArgument, BatchError, DoesNotFit, EmptyLoader
from hotloop.metrics.evaluation import Evaluation
from hotloop.objective.objectives import predict

pytestmark = pytest.mark.usefixtures("light_heap")


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.argmax(1) == target


@pytest.fixture(scope="module")
def counting() -> ModuleType:
    """Metrics of torchmetrics."""
    from . import counting

    return counting


def test_metrics_are_those_of_the_whole_set(task, counting) -> None:
    model = task.model()
    whole_output = model(task.inputs)
    expected = accuracy(whole_output, task.targets).float().mean().item()
    metrics = {
        "per_item": accuracy,
        "mean": lambda o, t: accuracy(o, t).float().mean(),
        "number": lambda o, t: accuracy(o, t).float().mean().item(),
        "torchmetrics": counting.MulticlassAccuracy(3, average="micro"),
        "own": counting.Right(),
        "several": counting.MulticlassRecall(3, average="none"),
    }
    result = evaluate(model, task.loader(16), metrics, loss=nn.CrossEntropyLoss())
    for name in ("per_item", "mean", "number", "torchmetrics", "own"):
        assert result[name] == pytest.approx(expected, abs=1e-6), name
    assert result["loss"] == pytest.approx(nn.functional.cross_entropy(whole_output, task.targets).item(), rel=1e-6)
    assert {"several[0]", "several[1]", "several[2]"} <= set(result)


class Half:
    def update(self, output: torch.Tensor, target: torch.Tensor) -> None: ...

    def compute(self) -> float:
        return 0.0


def two_losses(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    output = model(batch[0])
    return {"fit": nn.functional.cross_entropy(output, batch[1]), "size": output.square().mean()}


# Metrics, by what torchmetrics has; more arguments; what is said.
WRONG: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "none": (lambda known: None, {}, "nothing to evaluate"),
    "a collection": (
        lambda known: known.MetricCollection([known.Right()]),
        {},
        r'metrics is a MetricCollection\n.*{"all": collection}',
    ),
    "a class": (lambda known: {"a": known.Right}, {}, r"metric 'a' is the class Right\n.*Right\(…\)"),
    "a curve": (
        lambda known: {"roc": known.MulticlassROC(3, thresholds=5)},
        {},
        r"metric 'roc' computed a tuple(.|\n)*loop.predict",
    ),
    "a number": (lambda known: {"a": 3}, {}, "metric 'a' cannot be called"),
    "half of one": (lambda known: {"half": Half()}, {}, "metric 'half' has compute and no to and no reset"),
    "the loss": (lambda known: {"loss": accuracy}, {"loss": nn.CrossEntropyLoss()}, "a metric is called 'loss'"),
    "one of the losses": (
        lambda known: {"size": accuracy},
        {"objective": two_losses},
        "a metric is called 'size', as one of the losses is",
    ),
    **{
        f"returns a {type(wrong).__name__}": (
            partial(lambda wrong, known: {"a": lambda output, target: wrong}, wrong),
            {},
            f"metric 'a' returned a {type(wrong).__name__}\n.*a tensor",
        )
        for wrong in (None, "x", {"a": 1}, (1.0, 2.0, 3.0))
    },
}


@pytest.mark.parametrize(("metrics", "options", "says"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_evaluated_is_refused(task, counting, metrics: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        evaluate(task.model(), task.loader(), metrics(counting), **options)


def test_no_batch_and_no_model(task) -> None:
    with pytest.raises(EmptyLoader):
        evaluate(task.model(), [], {"a": accuracy})
    with pytest.raises(BadArgument, match="the model is a function"):
        evaluate(lambda x: x, [], {"a": torch.eq})


def test_a_metric_that_refuses_its_batch_is_named(counting) -> None:
    batches = [(torch.zeros(2, 5, 3), torch.zeros(2, 5, dtype=torch.long))]
    with pytest.raises(BatchError, match=r"metric 'a', MulticlassAccuracy, refuses .*(.|\n)*output.movedim\(-1, 1\)"):
        evaluate(nn.Identity(), batches, {"a": counting.MulticlassAccuracy(3)})
    with pytest.raises(BadArgument, match=r"\(2, 5, 3\) is not the classes(.|\n)*accuracy\(output.movedim\(-1, 1\)"):
        evaluate(nn.Identity(), batches, {"a": hotloop.metrics.accuracy})


class OwnLoss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        logits = self.inner(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_model_with_its_own_loss_runs_once_for_loss_and_metrics(task) -> None:
    model = OwnLoss(task.model())
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), device="cpu")
    batches = [{"x": x, "labels": y} for x, y in task.loader()]
    metrics = {"accuracy": hotloop.metrics.accuracy}
    expected = evaluate(model.inner, task.loader(), metrics, loss=nn.CrossEntropyLoss())
    assert loop.evaluate(batches, metrics) == pytest.approx(expected, rel=1e-6)
    assert model.calls == len(batches)
    own = loop.evaluate(batches, metrics, predict=lambda model, batch: (model.inner(-batch["x"]), batch["labels"]))
    assert own["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert own["accuracy"] != expected["accuracy"]


@pytest.mark.parametrize("boxed", [False, True], ids=["tensor", "object"])
def test_batches_of_one_shape_count_by_their_values(boxed: bool) -> None:
    """What a loss is the mean over is read of the first batch; where values decide it, of all."""

    def over_known(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = output[0] if boxed else output
        known = (target >= 0).float()
        return ((output[:, 0] - target).square() * known).sum() / known.sum()

    def predict(model: nn.Module, batch: list[torch.Tensor]) -> tuple[object, torch.Tensor]:
        return ([model(batch[0])] if boxed else model(batch[0])), batch[1]

    x, y = torch.randn(12, 1), torch.ones(12)
    y[[0, 1, 2, 5]] = -1.0
    batches = [[x[i : i + 4], y[i : i + 4]] for i in range(0, 12, 4)]

    result = evaluate(nn.Identity(), batches, loss=over_known, predict=predict, device="cpu")

    whole = (x[y >= 0, 0] - 1).square().mean().item()
    assert result["loss"] == pytest.approx(whole, rel=1e-5)


def known(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Whether the items with a label are right."""
    return accuracy(output, target)[target >= 0]


RIGHT, ONE_WRONG, NONE = (torch.tensor(labels) for labels in ([0, 0, 0, 0], [1, -1, -1, -1], [-1] * 4))


@pytest.mark.parametrize(
    ("targets", "expected"),
    [([RIGHT, ONE_WRONG], 4 / 5), ([RIGHT, NONE], 1.0), ([NONE, ONE_WRONG, RIGHT], 4 / 5), ([NONE], math.nan)],
    ids=["one", "none", "none, then one", "never"],
)
def test_a_metric_may_select_items(targets: list[torch.Tensor], expected: float) -> None:
    x = torch.tensor([[1.0, 0.0]] * 4)
    result = evaluate(nn.Identity(), [(x, target) for target in targets], {"a": known})
    assert result["a"] == pytest.approx(expected, nan_ok=True)


def test_a_tuple_is_values_and_weights_as_in_training() -> None:
    data = [(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 1, 0])), (torch.tensor([7.0]), torch.tensor([1]))]
    found = hotloop.evaluate(
        nn.Identity(),
        data,
        {
            "masked": lambda output, target: (output, target != 0),
            "mean": lambda output, target: ((output * target).sum() / target.sum(), target.sum()),
        },
    )
    assert found == pytest.approx({"masked": 10 / 3, "mean": 10 / 3})


def test_a_mean_may_have_a_dimension() -> None:
    x = torch.tensor([[1.0, 0.0]] * 4)
    metric = {"a": lambda output, target: accuracy(output, target).float().mean(0, keepdim=True)}
    assert evaluate(nn.Identity(), [(x, RIGHT), (x[:1], ONE_WRONG[:1])], metric) == {"a": 4 / 5}


def test_an_empty_batch_counts_for_nothing() -> None:
    x = torch.tensor([[1.0, 0.0]] * 4)
    metrics = {"a": hotloop.metrics.accuracy, "mean": lambda output, target: accuracy(output, target).float().mean()}
    assert evaluate(nn.Identity(), [(x, RIGHT), (x[:0], RIGHT[:0])], metrics) == {"a": 1.0, "mean": 1.0}


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


class Merging(nn.Linear):
    """Adds a weight of its own to the other in eval mode and takes it out in training mode, as LoRA's layers do."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.own = nn.Parameter(torch.ones(2, 2))
        self.is_merged = False

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if self.is_merged == mode:
            self.weight.data += -self.own if mode else self.own
            self.is_merged = not mode
        return self


def test_layers_that_override_train_end_in_the_state_of_their_mode() -> None:
    shared = nn.Dropout()
    merged = nn.Sequential(Merging(), Merging(), shared)
    model = nn.Sequential(Merging(), merged, nn.Sequential(shared))
    merged.eval()
    merged[1].train()
    model[2].eval()
    shared.train()  # in two blocks that are in eval mode
    layers = [module for module in model.modules() if isinstance(module, Merging)]
    before = [(m.training, m.is_merged, m.weight.clone()) for m in layers]
    assert [is_merged for _, is_merged, _ in before] == [False, True, False]
    modes = [module.training for module in model.modules()]
    x, states = torch.ones(1, 2), []

    def look(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        states.extend(m.is_merged for m in layers)
        return output.mean()

    evaluate(model, [(x, x)], {"a": look})

    assert states == [True] * 3
    assert [module.training for module in model.modules()] == modes
    for layer, (training, is_merged, weight) in zip(layers, before, strict=True):
        assert (layer.training, layer.is_merged) == (training, is_merged)
        torch.testing.assert_close(layer.weight, weight)


def test_a_scripted_model_that_has_trained_is_evaluated() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    x, y = torch.ones(8, 3), torch.zeros(8).long()
    for _ in range(3):  # until it is compiled for training
        model(x).sum().backward()
    evaluated = evaluate(model, [(x, y)] * 3, {"a": accuracy})
    assert evaluated == {"a": float((model(x).argmax(1) == y).float().mean())}


def test_modes_come_back_after_a_failure_too(task) -> None:
    model = task.model()

    def fail(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        evaluate(model, task.loader(), {"fail": fail})
    assert model.training


def test_a_torchmetric_starts_from_nothing_each_time(task, counting) -> None:
    metric = {"a": counting.MulticlassAccuracy(3)}
    assert evaluate(task.model(), task.loader(), metric) == evaluate(task.model(), task.loader(), metric)


@pytest.mark.gpu
def test_one_wait_at_the_end(task, counting) -> None:
    model = task.model().cuda()
    loader = [(x.cuda(), y.cuda()) for x, y in task.loader()]
    metrics = {"a": accuracy, "b": counting.Right()}  # many metrics of torchmetrics wait in `update`, as bincount does
    evaluate(model, loader, metrics, loss=nn.CrossEntropyLoss())
    with torch.profiler.profile(acc_events=True) as profile:
        evaluate(model, loader, metrics, loss=nn.CrossEntropyLoss())
    copies = [e for e in profile.events() if "Memcpy DtoH" in e.name]
    assert len(copies) == 1


class Picky(nn.Module):
    """A network that runs out of memory with more than so many items at once."""

    def __init__(self, inner: nn.Module, most: int) -> None:
        super().__init__()
        self.inner, self.most = inner, most
        self.computed: list[torch.Tensor] = []
        self.failures = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > self.most:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.computed.append(x)
        return self.inner(x)


@pytest.mark.parametrize("most", [1, 3, 7])
def test_what_does_not_fit_is_computed_in_pieces(task, most: int, counting) -> None:
    model = Picky(task.model(), most)
    metrics = {"a": accuracy, "b": counting.MulticlassAccuracy(3, average="micro"), "c": counting.Right()}
    loader = task.loader(16, shuffle=False)
    result = evaluate(model, loader, metrics, loss=nn.CrossEntropyLoss())
    expected = evaluate(model.inner, loader, metrics, loss=nn.CrossEntropyLoss())
    assert result == pytest.approx(expected, rel=1e-6)
    assert torch.equal(torch.cat(model.computed), task.inputs), "each item once, in order"
    assert model.failures <= 5 + 1, "the size is remembered"


@pytest.mark.parametrize("fails", range(1, 9))
def test_an_update_that_fails_in_the_middle_is_taken_back(task, fails: int, counting) -> None:
    metric = counting.Kept(fails)
    counts = counting.MulticlassAccuracy(3, average="micro")  # it is updated before and must not count twice
    means: list[int] = []

    def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        means.append(len(target))
        if len(means) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return accuracy(output, target).float().mean()

    metrics = {"first": counts, "kept": metric, "mean": mean}
    result = evaluate(task.model(), task.loader(16), metrics, loss=nn.CrossEntropyLoss())
    expected = evaluate(task.model(), task.loader(16), {"a": accuracy}, loss=nn.CrossEntropyLoss())
    assert result["kept/seen"] == 103
    assert result["kept/right"] == pytest.approx(expected["a"] * 103)
    assert result["first"] == pytest.approx(expected["a"], abs=1e-6)
    assert result["mean"] == pytest.approx(expected["a"], abs=1e-6)
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_metrics_of_metrics_are_taken_back_too(task, counting) -> None:
    both = counting.MetricCollection({"kept": counting.Kept(2), "share": counting.Right()}, compute_groups=False)
    result = evaluate(task.model(), task.loader(16), {"all": both})
    expected = evaluate(task.model(), task.loader(16), {"a": accuracy})
    assert result["all/share"] == pytest.approx(expected["a"], abs=1e-6)
    assert (result["all/right"], result["all/seen"]) == (pytest.approx(expected["a"] * 103), 103)


def test_objectives_with_weights_in_pieces(task) -> None:
    """A piece in which nothing counts is the mean of nothing, and so NaN."""
    targets = task.targets.clone()
    targets[5:11] = -100

    def objective(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]), (batch[1] >= 0).sum()

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(task.inputs, targets), 16)
    result = evaluate(Picky(task.model(), 2), data, objective=objective)
    assert result["loss"] == pytest.approx(evaluate(task.model(), data, objective=objective)["loss"], rel=1e-6)

    def counted(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        loss, count = objective(model, batch)
        return loss, int(count)

    assert evaluate(Picky(task.model(), 2), data, objective=counted)["loss"] == pytest.approx(result["loss"], rel=1e-6)


def test_random_models_draw_the_same_numbers_again(task) -> None:
    """In eval mode few models draw numbers; those that do go on as if nothing had failed."""

    def noisy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(())
        return model(batch[0]) + noise, batch[1]

    results = []
    for most in (100, 8):
        torch.manual_seed(4)
        data = [(task.inputs[:8], task.targets[:8]), (task.inputs[8:24], task.targets[8:24])]
        results.append(evaluate(Picky(task.model(), most), data[:1], {"o": lambda o, t: o.mean(1)}, predict=noisy))
    assert results[0] == results[1]


def test_a_single_item_that_does_not_fit(task) -> None:
    with pytest.raises(DoesNotFit, match="a single item does not fit"):
        evaluate(Picky(task.model(), 0), task.loader(16), {"a": accuracy})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::hotloop.errors.MemoryWarning")  # of memory that other tests left in pieces
def test_evaluation_on_a_gpu_that_is_too_small() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.times = nn.Linear(64, 3), 2**14

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x[:, None, :].repeat(1, self.times, 1).tanh().sigmoid().mean(1))

    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    data = [(x, x[:, :3].argmax(1))]
    model = Wide().cuda()
    expected = evaluate(model, data, {"a": accuracy}, loss=nn.CrossEntropyLoss())
    gc.collect()
    torch.cuda.empty_cache()
    total, room = torch.cuda.get_device_properties(0).total_memory, 400 * 2**20
    held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # by what other tests have left
    model.times *= 1 + held // room
    evaluation = Evaluation(model, torch.device("cuda:0"))
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + room) / total)
    try:
        result = evaluation.run(data, {"a": accuracy}, nn.CrossEntropyLoss(), None, predict, "fp32")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert evaluation.memory.portion.failures > 0
    assert result == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 0.5, 3.0]), ignore_index=2),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.NLLLoss(weight=torch.tensor([1.0, 0.5, 3.0])),
    ],
    ids=["plain", "weighted", "smooth", "sum", "nll"],
)
def test_a_loss_over_classes_is_that_of_all_batches_together(criterion: nn.CrossEntropyLoss | nn.NLLLoss) -> None:
    torch.manual_seed(0)
    output, target = torch.randn(500, 3).log_softmax(1), torch.randint(0, 3, (500,))
    target[:7] = criterion.ignore_index  # a whole batch
    target[30:40] = criterion.ignore_index
    sizes = [7, *[3] * 150, 43]  # more batches than are added up at a time
    batches = list(zip(output.split(sizes), target.split(sizes), strict=True))
    expected = criterion(output, target) / (500 if criterion.reduction == "sum" else 1)
    found = hotloop.evaluate(nn.Identity(), batches, {"right": lambda o, t: o.argmax(1) == t}, loss=criterion)
    assert found["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert found["right"] == pytest.approx((output.argmax(1) == target).double().mean().item())


def test_batches_of_several_dtypes() -> None:
    batches = [
        (torch.tensor([[0.5]]), torch.tensor([[1.0]])),
        (torch.tensor([[0.5]]).double(), torch.zeros(1, 1).double()),
    ]
    assert hotloop.evaluate(nn.Identity(), batches, loss=nn.MSELoss()) == {"loss": pytest.approx(0.25)}


def test_a_number_that_waits_keeps_no_batch() -> None:
    kept: list[weakref.ref[Any]] = []

    def first(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept.append(weakref.ref(output.untyped_storage()))
        assert sum(each() is not None for each in kept) <= 2, "this batch, and the one before"
        return output[0, 0]

    batches = ((torch.ones(2, 10_000), torch.ones(2)) for _ in range(6))
    assert evaluate(nn.Identity(), batches, {"first": first}) == {"first": 1.0}


@pytest.mark.parametrize("fails", range(1, 7))
def test_memory_that_runs_out_while_numbers_are_added_up(fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [(torch.full((2, 1), float(n)), torch.zeros(2, 1)) for n in range(100)]
    metrics = {"mean": lambda output, target: output.flatten(), "first": lambda output, target: output[0, 0]}
    expected = evaluate(nn.Identity(), batches, metrics, loss=nn.L1Loss())
    stack, calls = torch.stack, itertools.count(1)

    def scarce(*given: Any, **options: Any) -> torch.Tensor:
        if next(calls) == fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return stack(*given, **options)

    monkeypatch.setattr(torch, "stack", scarce)
    assert evaluate(nn.Identity(), batches, metrics, loss=nn.L1Loss()) == expected
    assert next(calls) > fails
    assert expected["mean"] == expected["loss"] == 49.5
