"""Metrics of the outputs that are trained on: exact, without another forward pass, and resumed in mid-epoch."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop
from hotloop.errors import BadArgument

from .test_state import Script, assert_resumed_alike

METRICS = {
    "accuracy": hotloop.metrics.accuracy,
    "top2": hotloop.metrics.top_k(2),
    "mean": lambda output, target: (output.argmax(1) == target).float().mean(),
    "entropy": lambda output, target: F.cross_entropy(output, target, reduction="none"),
    "weighted": lambda output, target: (output.max(1).values, target > 0),
}


class Counting(nn.Module):
    """Keeps its outputs in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        if self.training:
            self.kept.append(output.detach())
        return output


def loop_of(model: nn.Module, **options: Any) -> hotloop.Loop:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = {"device": "cpu", "plan": "plain", **options}
    return hotloop.Loop(model, optimizer, given.pop("loss", nn.CrossEntropyLoss()), **given)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def test_they_are_of_the_outputs_that_were_trained_on(task, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Counting()
    targets: list[Tensor] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if output.requires_grad:
            targets.append(target)
        return F.cross_entropy(output, target)

    loop = loop_of(model, loss=loss, train_metrics=METRICS)
    report = loop.fit(
        task.loader(16), epochs=2, validate=task.loader(16), progress=False, monitor=False, log=tmp_path / "log.jsonl"
    )
    batches = len(targets) // 2
    assert len(model.kept) == 2 * batches == 14, "one forward pass for each batch"
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    ends = [line for line in lines if "epoch" in line]
    for number, epoch in enumerate(report.epochs):
        chosen = slice(number * batches, (number + 1) * batches)
        output, target = torch.cat(model.kept[chosen]), torch.cat(targets[chosen])
        right = (output.argmax(1) == target).double()
        among = (output.topk(2, 1).indices == target.unsqueeze(1)).any(1).double()
        assert epoch.train_metrics == {
            "accuracy": pytest.approx(right.mean().item()),
            "top2": pytest.approx(among.mean().item()),
            "mean": pytest.approx(right.mean().item()),
            "entropy": pytest.approx(epoch.loss, rel=1e-5),
            "weighted": pytest.approx(output.max(1).values[target > 0].mean().item(), rel=1e-5),
        }
        assert ends[number]["train/accuracy"] == epoch.train_metrics["accuracy"]
        assert "accuracy" not in epoch.metrics, "those of the validation are apart"
    assert hotloop.Report.from_json(report.to_json()) == report


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"plan": hotloop.Plan("cpu", micro_batch=5)}])
def test_the_training_is_the_same(task, options: dict[str, Any]) -> None:
    weights, losses = [], []
    for metrics in (None, METRICS):
        loop = loop_of(network(), train_metrics=metrics, **options)
        torch.manual_seed(5)
        report = loop.fit(task.loader(16), epochs=2, validate=task.loader(16), progress=False, monitor=False)
        weights.append([p.detach() for p in loop.model.parameters()])
        losses.append([(e.loss, e.metrics) for e in report.epochs])
    assert all(map(torch.equal, *weights))
    assert losses[0] == losses[1]
    entropy = [epoch.train_metrics["entropy"] for epoch in report.epochs]
    assert entropy == pytest.approx([epoch.loss for epoch in report.epochs], rel=1e-5), "each item once"


def test_a_batch_that_is_repeated_counts_once(task, memory_of: Callable[[int], Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4096)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    metrics = {"entropy": METRICS["entropy"]}
    loop = loop_of(model, loss=loss, train_metrics=metrics)
    batches = [(torch.randn(64, 6), torch.randint(3, (64,)))] * 3
    with memory_of(2_500_000), pytest.warns(hotloop.errors.MemoryWarning):
        report = loop.fit(batches, progress=False, monitor=False)
    assert loop.out_of_memory > 0
    assert report.epochs[0].train_metrics["entropy"] == pytest.approx(report.epochs[0].loss, rel=1e-5)


def test_they_are_resumed_in_mid_epoch(task) -> None:
    assert_resumed_alike(lambda: Script(loop_of(network(), train_metrics=METRICS), task.loader(16)), [10], 3)


def test_they_may_select_items() -> None:
    def known(output: Tensor, target: Tensor) -> Tensor:
        return (output.argmax(1) == target)[target >= 0]

    model = nn.Linear(2, 2)
    nn.init.eye_(model.weight)
    nn.init.zeros_(model.bias)
    x = torch.tensor([[1.0, 0.0]] * 4)
    batches = [(x, torch.tensor(labels)) for labels in ([0, 0, 0, 0], [1, -1, -1, -1], [-1] * 4)]
    metrics = {
        "known": known,
        "mean": lambda output, target: (output.argmax(1) == target).float().mean(0, keepdim=True),
        "never": lambda output, target: known(output, target)[:0],
    }
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, ignore_index=-1, reduction="sum")

    loop = hotloop.Loop(model, optimizer, loss, device="cpu", plan="plain", train_metrics=metrics)
    found = loop.fit(batches, progress=False, monitor=False).epochs[0].train_metrics
    assert found == pytest.approx({"known": 4 / 5, "mean": 4 / 12, "never": math.nan}, nan_ok=True)


def test_what_cannot_be_measured_is_refused() -> None:
    class Own:
        def to(self, device: Any) -> "Own":
            return self

        def reset(self) -> None: ...
        def update(self, output: Any, target: Any) -> None: ...
        def compute(self) -> float:
            return 0.0

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(BadArgument, match="train_metrics= without loss="):
        hotloop.Loop(model, optimizer, objective=lambda model, batch: model(batch).mean(), train_metrics=METRICS)
    with pytest.raises(BadArgument, match="keeps its own sums"):
        loop_of(model, train_metrics={"own": Own()})
    with pytest.raises(BadArgument, match="cannot be called"):
        loop_of(model, train_metrics={"three": 3})


def test_an_error_of_a_metric_is_not_blamed_on_the_loss() -> None:
    loop = loop_of(network(), train_metrics={"wrong": lambda output: output})
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        loop.step((torch.randn(3, 6), torch.arange(3)))


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [0, 1, 4])
def test_captured_steps_add_them_up_without_a_synchronization(task, graph: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3).cuda()
    plan = hotloop.Plan("cuda", graph=graph, stream="resident")
    loop = loop_of(model, device=None, plan=plan, train_metrics={n: METRICS[n] for n in ("accuracy", "entropy")})
    loop.fit(task.loader(8), epochs=3, progress=False, monitor=False)
    assert loop.plan.graph == graph
    report = loop.fit(task.loader(8), epochs=3, progress=False, monitor=False)
    for epoch in report.epochs:
        assert epoch.train_metrics["entropy"] == pytest.approx(epoch.loss, rel=1e-4)
        assert 0.3 < epoch.train_metrics["accuracy"] <= 1
    batch = (task.inputs[:8].cuda(), task.targets[:8].cuda())
    for _ in range(20):
        loop.step(batch)  # in which it is captured
    with hotloop.waits("cuda") as seen:
        for _ in range(10):
            loop.step(batch)
    assert len(seen) == 0
