"""How batches are cut and weighed: what is right, what is refused, what a plan may say, and that no trace is left."""

import random
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotloop import Loop, Plan, evaluate, survive_oom
from hotloop.errors import BadArgument, DoesNotFit, MemoryWarning, PlanWarning

from .losses import numbers

pytestmark = pytest.mark.usefixtures("light_heap")


def network(inputs: int = 6, outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def loop_of(model: nn.Module, lr: float = 0.1, **options: Any) -> Loop:
    return Loop(model, torch.optim.SGD(model.parameters(), lr), device="cpu", **options)


def step(model: nn.Module, batch: Any, plan: Plan, **goal: Any) -> list[Tensor]:
    loop = loop_of(model, 0.0, plan=plan, **goal)
    loop.step(batch)
    return gradients(model)


def steps(loop: Loop, batches: Iterable[Any]) -> None:
    for batch in batches:
        loop.step(batch)


def assert_whole(make: Any, batch: Any, plan: Plan, objective: Any) -> None:
    model = make()
    objective(model, batch).backward()
    torch.testing.assert_close(step(make(), batch, plan, objective=objective), gradients(model), rtol=1e-4, atol=1e-6)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.GRU(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x)[0][-1])


def last_step(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


TIME_FIRST = (numbers(7, 10, 4), torch.arange(10) % 3)


def test_time_first_batches_are_refused_and_the_dimension_can_be_said() -> None:
    for plan in (Plan("cpu", micro_batch=3), Plan("cpu", micro_batch=3, split=0)):
        with pytest.raises(BadArgument, match=r"fix: .* split=1 "):
            step(TimeFirst(), TIME_FIRST, plan, objective=last_step)
    assert_whole(TimeFirst, TIME_FIRST, Plan("cpu", micro_batch=3, split=1), last_step)
    with pytest.raises(BadArgument, match="no tensor of the batch has so many dimensions"):
        step(TimeFirst(), TIME_FIRST, Plan("cpu", micro_batch=3, split=5), objective=last_step)
    loop = loop_of(TimeFirst(), 0.0, objective=last_step, micro_batch=3, split=1)  # which plans itself
    assert loop.fit([TIME_FIRST] * 5, progress=False).epochs[0].items == 50


def graph_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Messages along edges between the nodes of several graphs, then a mean over each graph."""
    source, target = batch["edges"]
    h = model(batch["x"])
    h = h.index_add(0, target, h[source])
    graphs = int(batch["graph"].max()) + 1
    pooled = torch.zeros(graphs, h.size(1)).index_add(0, batch["graph"], h)
    return F.mse_loss(pooled, batch["y"][:graphs])


def graphs() -> dict[str, Tensor]:
    x = numbers(12, 6)
    edges = torch.tensor([[i, (i + 1) % 3 + i // 3 * 3] for i in range(12)]).T
    return {"x": x, "edges": edges, "graph": torch.arange(12) // 3, "y": numbers(4, 3, seed=2)}


def cut_graphs(batch: dict[str, Tensor], start: int, stop: int) -> tuple[dict[str, Tensor], int]:
    nodes = (batch["graph"] >= start) & (batch["graph"] < stop)
    edges = batch["edges"][:, nodes[batch["edges"][0]]] - 3 * start
    part = {"x": batch["x"][nodes], "edges": edges, "graph": batch["graph"][nodes] - start, "y": batch["y"][start:stop]}
    return part, stop - start


cut_graphs.items = lambda batch: len(batch["y"])


def test_graphs_are_refused_and_a_function_can_cut_them() -> None:
    with pytest.raises(BadArgument, match="micro_batch=2"):
        step(network(), graphs(), Plan("cpu", micro_batch=2), objective=graph_loss)
    assert_whole(network, graphs(), Plan("cpu", micro_batch=3, split=cut_graphs), graph_loss)
    backward = survive_oom(network(), objective=graph_loss, split=cut_graphs)
    assert backward(graphs()).isfinite()


def test_the_weight_that_a_function_gives_is_compared_too() -> None:
    def wrong(batch: Any, start: int, stop: int) -> Any:
        return cut_graphs(batch, start, stop)[0], 1 + start

    wrong.items = cut_graphs.items
    with pytest.raises(BadArgument, match="as your function weighs them"):
        step(network(), graphs(), Plan("cpu", micro_batch=3, split=wrong), objective=graph_loss)


def stacked(model: nn.Module, batch: Tensor) -> Tensor:
    """Two views of each sample, one above the other."""
    a, b = model(batch).chunk(2)
    return F.mse_loss(a, b)


def test_stacked_pairs_are_refused() -> None:
    with pytest.raises(BadArgument, match="not cut along its items"):
        step(network(), numbers(16, 6), Plan("cpu", micro_batch=4), objective=stacked)

    def cut(batch: Tensor, start: int, stop: int) -> Tensor:
        return batch.view(2, -1, 6)[:, start // 2 : stop // 2].reshape(-1, 6)

    assert_whole(network, numbers(16, 6), Plan("cpu", micro_batch=4, split=cut), stacked)


def test_a_table_of_the_size_of_the_batch_is_refused() -> None:
    def attended(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss((model(batch["x"]) @ batch["table"].T).softmax(1) @ batch["table"], batch["y"])

    batch = {"x": numbers(8, 6), "table": numbers(8, 3, seed=2), "y": numbers(8, 3, seed=3)}
    with pytest.raises(BadArgument, match="not that of its micro-batches"):
        step(network(), batch, Plan("cpu", micro_batch=3), objective=attended)

    def cut(batch: dict[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
        return {**batch, "x": batch["x"][start:stop], "y": batch["y"][start:stop]}

    assert_whole(network, batch, Plan("cpu", micro_batch=3, split=cut), attended)


class Normalising(nn.Module):
    """Writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.sub_(1.0).div_(2.0))


def test_a_model_that_writes_into_its_input() -> None:
    for plan in (Plan("cpu", micro_batch=3), Plan("cpu", accumulate=2)):
        ours, theirs = Normalising(), Normalising()
        loop = loop_of(ours, 0.0, loss=nn.CrossEntropyLoss(), plan=plan)
        batch = (numbers(8, 6), torch.arange(8) % 3)
        parts = [batch] if plan.accumulate == 1 else [tuple(t[:5] for t in batch), tuple(t[5:] for t in batch)]
        for each in parts:
            loop.step(each)
        F.cross_entropy(theirs(numbers(8, 6)), batch[1]).backward()
        torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-4, atol=1e-6)


def test_ignored_targets_that_come_later() -> None:
    """The first batches show none, so that weighing by items would do for them."""
    ours, theirs = network(), network()
    loop = loop_of(ours, loss=nn.CrossEntropyLoss(), accumulate=2)
    other = torch.optim.SGD(theirs.parameters(), 0.1)
    for number in range(8):
        x, y = numbers(8, 6, seed=number), torch.arange(8) % 3
        y[: 2 * max(0, number - 4)] = -100
        loop.step((x[:5], y[:5]))
        loop.step((x[5:], y[5:]))
        other.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        other.step()
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-4, atol=1e-6)


def test_a_sum_of_means_over_different_things_is_told() -> None:
    def objective(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        return F.cross_entropy(output, batch[1]) + output.square().mean()

    targets = torch.tensor([-100, -100, -100, 1, 1, 2, 0, 1])
    with pytest.raises(BadArgument, match="averages over something else"):
        step(network(), (numbers(8, 6), targets), Plan("cpu", micro_batch=3), objective=objective)
    even = torch.arange(8) % 3
    assert_whole(network, (numbers(8, 6), even), Plan("cpu", micro_batch=3), objective)


class Unusual(nn.Module):
    """Random numbers of every kind, buffers that are written and exchanged, and Python state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.own = torch.Generator().manual_seed(5)
        self.calls, self.seen = 0, []
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("exchanged", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        x = F.dropout(x, 0.2) * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())  # noqa: S311
        out = self.inner(x + 0.1 * torch.rand(len(x), 1, generator=self.own) + 0.1 * torch.randn_like(x))
        self.written.lerp_(out.detach().mean(0), 0.1)
        self.exchanged = self.exchanged + out.detach().sum(0)
        return out


@pytest.mark.parametrize("setting", [{"micro_batch": 3}, {"accumulate": 2}])
def test_the_comparison_leaves_no_trace(setting: dict[str, int]) -> None:
    results: list[Any] = []
    for split in ("auto", "items"):
        model = Unusual()
        plan = Plan("cpu", split=split, **setting)
        loop = Loop(
            model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), nn.MSELoss(), device="cpu", plan=plan
        )
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        for number in range(10):
            loop.step((numbers(9, 6, seed=number), numbers(9, 3, seed=number)))
        states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), model.own.get_state())
        results.append(([*model.state_dict().values()], states, model.calls, model.seen))
    (a, b) = results
    assert all(map(torch.equal, a[0], b[0]))
    assert torch.equal(a[1][0], b[1][0])
    assert a[1][1:3] == b[1][1:3]
    assert torch.equal(a[1][3], b[1][3])
    assert a[2:] == b[2:]


def test_an_objective_with_state_is_not_called_more_often_when_batches_accumulate() -> None:
    calls: list[int] = []

    def objective(model: nn.Module, batch: Any) -> Tensor:
        calls.append(len(batch[0]))
        return F.cross_entropy(model(batch[0]), batch[1])

    loop = loop_of(network(), objective=objective, accumulate=2)
    for number in range(6):
        loop.step((numbers(9, 6, seed=number), torch.arange(9) % 3))
    assert calls == [9] * 6


def test_an_objective_with_state_whose_loss_cannot_be_read_is_told() -> None:
    calls: list[int] = []

    def objective(model: nn.Module, batch: Any) -> Tensor:
        calls.append(len(batch[0]))
        return F.mse_loss(model(batch[0]), batch[1]).sqrt()

    loop = loop_of(network(), objective=objective, accumulate=2)
    with pytest.warns(PlanWarning, match=r"not known.*calls.*weighed by items"):
        steps(loop, [(numbers(9, 6, seed=number), numbers(9, 3, seed=number)) for number in range(4)])
    assert calls == [9] * 4


@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
def test_what_is_changed_once_is_not_said_to_change_in_each_call(always: bool) -> None:
    """Classifiers of Hugging Face note the kind of their problem in their config when they are called first."""
    config: dict[str, int] = {}

    def objective(model: nn.Module, batch: Any) -> Tensor:
        config["kind"] = config.get("kind", 0) + 1 if always else 1
        return F.cross_entropy(model(batch[0]), batch[1])

    loop = loop_of(network(), objective=objective, micro_batch=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        steps(loop, [(numbers(9, 6, seed=number), torch.arange(9) % 3) for number in range(3)])
    assert [str(each.message).partition(",")[0] for each in caught] == [
        "your code changes config in each call"
    ] * always


@pytest.mark.parametrize("setting", [{"micro_batch": 3}, {"accumulate": 2}])
def test_masks_that_numpy_draws_for_each_item_do_not_couple_them(setting: dict[str, int]) -> None:
    def masked(model: nn.Module, batch: Any) -> Tensor:
        mask = np.stack([np.random.permutation(6) > 0 for _ in batch[0]])
        return F.cross_entropy(model(batch[0] * torch.from_numpy(mask)), batch[1])

    def coupled(model: nn.Module, batch: Any) -> Tensor:
        rows = F.normalize(model(batch[0] + 0.01 * float(np.random.rand())), dim=1)
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))

    batches = [(numbers(9, 6, seed=number), torch.arange(9) % 3) for number in range(4)]
    for objective, words in ((masked, None), (coupled, "not that of its micro-batches")):
        loop = loop_of(network(), objective=objective, **setting)
        with warnings.catch_warnings():
            warnings.simplefilter("error", PlanWarning)
            if words is None:
                steps(loop, batches)
                continue
            with pytest.raises((BadArgument, PlanWarning), match=words):
                steps(loop, batches)


def test_the_plan_can_refuse_every_cut() -> None:
    model = network()
    model.register_forward_hook(_run_out)
    loop = loop_of(model, loss=nn.CrossEntropyLoss(), plan=Plan("cpu", split="off"))
    with pytest.raises(DoesNotFit, match="must not be cut"):
        loop.step((numbers(9, 6), torch.arange(9) % 3))


def _run_out(module: nn.Module, given: Any, output: Tensor) -> None:
    if len(output) > 4:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_plan_with_a_function_goes_to_json_by_its_name() -> None:
    data = Plan("cpu", split=cut_graphs).to_json()
    assert data["split"] == "cut_graphs"
    assert Plan.from_json(data).split == "auto"
    for split in ("auto", "items", "off", 1):
        assert Plan.from_json(Plan("cpu", split=split).to_json()).split == split


@pytest.mark.parametrize("split", ["sideways", -1, 1.5, True, None])
def test_a_split_that_is_none(split: Any) -> None:
    with pytest.raises(BadArgument, match=r"(?s)split=.*fix:.*dimension.*function"):
        Plan("cpu", split=split)
    with pytest.raises(BadArgument, match="split="):
        survive_oom(network(), nn.MSELoss(), split=split)
    with pytest.raises(BadArgument, match="never cuts"):
        Plan("cpu", micro_batch=3, split="off")


def stepping(model: nn.Module, lr: float = 0.1) -> list[int]:
    """An optimizer for each weight, which steps in the backward pass."""
    steps: list[int] = []

    def hook(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=lr)
        parameter.grad = None
        steps.append(1)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return steps


def test_optimizers_that_step_in_the_backward_pass_do_not_step_twice() -> None:
    model = network()
    steps = stepping(model)
    fits, does_not = (numbers(4, 6), torch.arange(4) % 3), (numbers(9, 6), torch.arange(9) % 3)
    backward = survive_oom(model, nn.CrossEntropyLoss())
    backward(fits)
    assert len(steps) == 4, "whole batches are fine"
    before = [p.detach().clone() for p in model.parameters()]
    model.register_forward_hook(_run_out)
    with pytest.raises(DoesNotFit, match=r"(?s)hooks.*several times for one batch.*fix:"):
        backward(does_not)
    assert all(map(torch.equal, before, model.parameters()))
    loop = loop_of(model, loss=nn.CrossEntropyLoss(), plan="plain")
    with pytest.warns(MemoryWarning), pytest.raises(DoesNotFit, match="hooks"):
        loop.step(does_not)
    assert all(map(torch.equal, before, model.parameters()))


def test_an_evaluation_whose_loss_depends_on_the_memory_is_warned_of() -> None:
    def objective(model: nn.Module, batch: Any) -> Tensor:
        a, b = (F.normalize(model(each), dim=1) for each in batch)
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))

    model = network()
    model.register_forward_hook(_run_out)
    with pytest.warns(MemoryWarning, match="memory ran out in an evaluation, and the loss is not that"):
        evaluate(model, [(numbers(8, 6), numbers(8, 6, seed=2))], objective=objective)


def test_what_is_compared_may_be_a_part_of_the_batch() -> None:
    """The whole batch does not fit even without gradients."""
    model = network()
    model.register_forward_hook(_run_out)
    backward = survive_oom(model, objective=lambda model, batch: model(batch).square().mean().sqrt())
    with pytest.raises(DoesNotFit, match=r"for 4 items at once"):
        backward(numbers(16, 6) * torch.arange(16)[:, None])


def test_another_size_of_micro_batches_is_compared_again() -> None:
    """Means over neighbours: those of four items are whole in parts of four, and not in parts of two."""

    def objective(model: nn.Module, batch: Tensor) -> Tensor:
        output = model(batch)
        return output.view(-1, min(4, len(output)), 3).mean(1).square().mean()

    most = 4
    model = network()

    def run_out(module: nn.Module, given: Any, output: Tensor) -> None:
        if len(output) > most and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")

    whole, batch = network(), numbers(8, 6)
    objective(whole, batch).backward()
    model.register_forward_hook(run_out)
    backward = survive_oom(model, objective=objective)
    backward(batch)
    torch.testing.assert_close(gradients(model), gradients(whole), rtol=1e-4, atol=1e-6)
    most = 2
    with pytest.raises(DoesNotFit, match="not that of its micro-batches"):
        backward(batch)


def test_a_head_that_begins_with_zeros_is_compared_again() -> None:
    """All micro-batches have the same loss at first, whatever they are weighed by."""

    def objective(model: nn.Module, batch: Any) -> Tensor:
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none") * batch[2]
        return each.sum() * batch[2].sum().reciprocal()  # a mean that nobody can read

    model = network()
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    plan = Plan("cpu", micro_batch=3)
    loop = loop_of(model, 5.0, objective=objective, plan=plan)
    batch = (numbers(8, 6), torch.arange(8) % 3, torch.tensor([1.0, 0, 0, 0, 0, 1, 1, 1]))
    with pytest.raises(BadArgument, match="averages over something else"):
        steps(loop, [batch] * 3)


@pytest.fixture
def _aot_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compile_(model, backend="aot_eager", dynamic=False))


def own_mask(model: nn.Module, batch: Any) -> Tensor:
    each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (each * batch[2]).sum() / batch[2].sum()


@pytest.mark.usefixtures("_aot_eager")
@pytest.mark.parametrize("how", ["criterion", "objective"])
def test_compiled_losses_count_their_targets(how: str) -> None:
    loss = nn.CrossEntropyLoss(ignore_index=0, weight=torch.tensor([1.0, 0.3, 4.0]))
    goal: Any = {"loss": loss} if how == "criterion" else {"objective": lambda m, batch: loss(m(batch[0]), batch[1])}
    ours, theirs = network(), network()
    plan = Plan("cpu", compile="default", accumulate=2)
    loop = loop_of(ours, plan=plan, **goal)
    other = torch.optim.SGD(theirs.parameters(), 0.1)
    for number in range(4):
        x, y = numbers(8, 6, seed=number), (torch.arange(8) + number) ** 2 % 3
        loop.step((x[:4], y[:4]))
        loop.step((x[4:], y[4:]))
        other.zero_grad()
        loss(theirs(x), y).backward()
        other.step()
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("_aot_eager")
def test_a_compiled_objective_with_a_mask_of_its_own_says_that_it_runs_eagerly() -> None:
    ours, theirs = network(), network()
    plan = Plan("cpu", compile="default", accumulate=2)
    loop = loop_of(ours, 0.0, objective=own_mask, plan=plan)
    x, y, mask = numbers(8, 6), torch.arange(8) % 3, torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1])
    with pytest.warns(PlanWarning, match="runs eagerly"):
        steps(loop, zip(x.split(4), y.split(4), mask.split(4), strict=True))
    own_mask(theirs, (x, y, mask)).backward()
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-4, atol=1e-6)


def test_an_objective_with_a_mask_of_its_own_is_tuned_without_a_word_of_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hotloop.tune.course.WORTH_ON_CPU", 1)
    loop = loop_of(network(), objective=own_mask, micro_batch=3)
    batches = [(numbers(8, 6), torch.arange(8) % 3, torch.rand(8)) for _ in range(4)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loop.fit(batches, epochs=4, progress=False, monitor=False)
    assert loop.tuning is not None
    assert not told


def test_evaluation_cuts_time_first_batches_as_the_plan_says() -> None:
    model = TimeFirst()
    expected = last_step(model, TIME_FIRST).item()
    model.register_forward_hook(_run_out)
    plan = Plan("cpu", split=1)
    loop = loop_of(model, loss=nn.CrossEntropyLoss(), plan=plan)
    assert loop.evaluate([TIME_FIRST])["loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(DoesNotFit, match="must not be cut"):
        evaluate(model, [TIME_FIRST], loss=nn.CrossEntropyLoss(), split="off")
