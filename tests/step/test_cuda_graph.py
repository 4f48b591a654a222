"""The step as a CUDA graph: the same training as without, and left alone where a capture would be wrong."""

import gc
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import PlanWarning
from hotloop.placement.waits import waits
from hotloop.step.captured_graph import CannotCapture, CapturedGraph, Rates, renew_accumulation

CUDA = hotloop.Plan(device="cuda:0")
pytestmark = pytest.mark.simulated


def data(rows: int = 256) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 8, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)  # a bias before a BatchNorm has no gradient but noise, which Adam would make large
    return nn.Sequential(
        nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 3)
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-2)


def loader(rows: int = 256, batch: int = 16, **options: Any) -> DataLoader[Any]:
    return DataLoader(data(rows), batch, shuffle=True, generator=torch.Generator().manual_seed(1), **options)


def losses(
    plan: hotloop.Plan | str, *, rows: int = 256, epochs: int = 2, optimizer: Callable[..., Any] = adam, **options: Any
):
    """The loss of every step, and the model at the end."""
    model = network(options.pop("dropout", 0.0))
    made = optimizer(model)
    schedule = options.pop("schedule", None)
    if schedule is not None:
        options["scheduler"] = schedule(made)
    loop = hotloop.Loop(model, made, nn.CrossEntropyLoss(), device="cuda", plan=plan, **options)
    batches = loader(rows)
    seen = [loop.step(batch) for _ in range(epochs) for batch in loop.batches(batches)]
    return torch.stack(seen), loop


def test_a_graph_needs_cuda() -> None:
    model = network()
    with pytest.raises(hotloop.HotloopError, match=r"graph.*needs a CUDA device"):
        hotloop.Loop(model, adam(model), nn.CrossEntropyLoss(), device="cpu", plan=hotloop.Plan("cpu", graph=1))


SAME: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {  # beside the zoo: a run, its plan, and how near
    "adamw": ({"optimizer": lambda model: torch.optim.AdamW(model.parameters(), 1e-2, fused=True)}, {}, 2e-4),
    "momentum": (
        {"optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, dampening=0.1)},
        {},
        2e-4,
    ),
    "rmsprop": ({"optimizer": lambda model: torch.optim.RMSprop(model.parameters(), 1e-3)}, {}, 2e-4),
    "accumulation over a tail": ({"rows": 203, "epochs": 3}, {"accumulate": 3}, 1e-3),
    "clipping and bf16": ({}, {"clip_norm": 0.1, "precision": "bf16"}, 2e-2),
}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:batch normalisation")  # which sees each batch of a window by itself
@pytest.mark.parametrize(("run", "settings", "near"), SAME.values(), ids=SAME)
def test_the_same_training_as_without(run: dict[str, Any], settings: dict[str, Any], near: float) -> None:
    plain, one = losses("plain", **run, **settings)
    graphed, loop = losses(replace(CUDA, graph=1, **settings), **run)
    assert loop.plan.graph == 1
    torch.testing.assert_close(graphed, plain, rtol=near, atol=near / 10)
    assert loop.steps == one.steps


def test_gradients_accumulate_anew_although_somebody_holds_a_graph() -> None:
    weight, calls = nn.Parameter(torch.ones(3)), []
    weight.register_hook(lambda gradient: calls.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    held = (weight * weight).sum()
    node = get_gradient_edge(weight).node
    address, version = weight.data_ptr(), weight._version
    renew_accumulation([weight])
    assert get_gradient_edge(weight).node is not node
    assert (weight.data_ptr(), weight._version, weight.dtype) == (address, version, torch.float32)
    (3 * weight).sum().backward()
    held.backward()
    assert torch.equal(weight.grad, torch.full((3,), 5.0))
    assert calls == ["gradient", "accumulated"] * 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:batch normalisation")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_of_an_earlier_loop_that_is_still_there_is_no_obstacle(accumulate: int) -> None:
    def trained(graph: int) -> tuple[list[float], hotloop.Loop]:
        model = network().cuda()
        optimizer = adam(model)
        x, y = (tensor.cuda() for tensor in data().tensors)
        held = nn.functional.cross_entropy(model(x), y)
        held.backward()
        optimizer.step()
        plan = replace(CUDA, graph=graph, accumulate=accumulate)
        loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), plan=plan)
        report = loop.fit(loader(), epochs=3, progress=False, monitor=False)
        assert held.grad_fn is not None
        return [epoch.loss for epoch in report.epochs], loop

    captured, loop = trained(1)
    assert loop.plan.graph == 1
    assert captured == pytest.approx(trained(0)[0], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.simulated(False)
def test_without_a_graph_there_are_no_kernels_that_are_for_graphs() -> None:
    def drawing(model: nn.Module, batch: Any) -> Tensor:
        torch.randn(1)  # on the host
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 3))
    plan = replace(CUDA, graph=1, precision="bf16", levers=("row kernels",))
    loop = hotloop.Loop(model, adam(model), objective=drawing, plan=plan)
    with pytest.warns(PlanWarning, match="random numbers on the host"):
        loop.fit(loader(), epochs=1, progress=False, monitor=False)
    assert (loop.plan.graph, loop.plan.levers) == (0, ())


@pytest.mark.gpu
def test_another_setting_that_changes_ends_the_captures_with_the_reason() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=100)

    plain, _ = losses("plain", schedule=schedule)
    with pytest.warns(PlanWarning, match="betas"):
        graphed, loop = losses(replace(CUDA, graph=1), schedule=schedule)
    assert loop.plan.graph == 0
    torch.testing.assert_close(graphed, plain, rtol=2e-4, atol=2e-5)


class Waiting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:  # the host must wait for this
            return x
        return super().forward(x)


class Deciding(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:  # noqa: S311
            x = x * 2
        return super().forward(x)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * (1 + self.calls / 1000))  # another number in each step


class Synchronizing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return super().forward(x)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Waiting, "waits for the device.*test_cuda_graph.py.*if x.sum"),
        (Deciding, "random numbers on the host"),
        (Counting, "other work in each step.*test_cuda_graph.py.*self.calls"),
        (Synchronizing, "test_cuda_graph.py.*torch.cuda.synchronize"),
    ],
)
def test_what_cannot_be_captured_goes_on_without_and_names_the_line(kind: type[nn.Linear], words: str) -> None:
    def run(plan: Any) -> tuple[Tensor, hotloop.Loop]:
        torch.manual_seed(0)
        random.seed(0)
        model = kind(8, 3)
        loop = hotloop.Loop(model, adam(model), nn.CrossEntropyLoss(), device="cuda", plan=plan)
        return torch.stack([loop.step(batch) for batch in loop.batches(loader())]), loop

    with pytest.warns(PlanWarning, match=words):
        graphed, loop = run(replace(CUDA, graph=1))
    assert loop.plan.graph == 0
    torch.testing.assert_close(graphed, run("plain")[0], rtol=1e-4, atol=1e-5)
    torch.rand(4, device="cuda")  # the generator works on after a capture that failed


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:batch normalisation")  # which sees each batch of a window by itself
@pytest.mark.parametrize("accumulate", [1, 2])
def test_several_steps_in_one_graph_are_the_same_training(accumulate: int) -> None:
    def fitted(plan: Any, **options: Any) -> tuple[hotloop.Report, hotloop.Loop]:
        model = network()
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        loop = hotloop.Loop(
            model, optimizer, nn.CrossEntropyLoss(), device="cuda", plan=plan, scheduler=scheduler, **options
        )
        return loop.fit(loader(rows=203), epochs=6, progress=False), loop

    plain, one = fitted("plain", accumulate=accumulate)
    graphed, loop = fitted(replace(CUDA, stream="resident", graph=4, accumulate=accumulate))
    assert loop.plan.graph == 4
    assert loop._core.data.stretches.latest is not None
    assert [e.items for e in graphed.epochs] == [203] * 6
    assert loop.steps == one.steps
    for a, b in zip(plain.epochs, graphed.epochs, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=2e-3)
    for p, q in zip(one.model.parameters(), loop.model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=5e-3, atol=5e-4)


@pytest.mark.gpu
def test_a_loss_that_is_not_finite_among_several_steps_is_named_with_its_step() -> None:
    rows = data(256)
    rows.tensors[0][100] = torch.nan
    model = network()
    batches = DataLoader(rows, 8)
    loop = hotloop.Loop(
        model, adam(model), nn.CrossEntropyLoss(), device="cuda", plan=replace(CUDA, stream="resident", graph=4)
    )
    with pytest.raises(hotloop.HotloopError, match=r"at step 13 .epoch 1, batch 12.*\n.*samples"):
        loop.fit(batches, epochs=3, progress=False)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [0, 1, 4])
def test_nothing_waits_in_steady_steps(graph: int) -> None:
    model = network(0.1)
    plan = replace(CUDA, stream="resident", graph=graph)
    loop = hotloop.Loop(model, adam(model), nn.CrossEntropyLoss(), device="cuda", plan=plan)
    batches = loader(rows=16 * 120)
    for batch in loop.batches(batches):  # warm-up and captures
        loop.step(batch)
    with waits() as seen:
        for number, batch in enumerate(loop.batches(batches)):
            loop.step(batch)
            if number == 100:
                break
    assert len(seen) == 0, str(seen)
    if graph > 1:
        for _ in loop._core.data.work(batches, None):
            pass
        with waits() as seen:
            for _ in loop._core.data.work(batches, None):
                pass
        assert len(seen) == 0, str(seen)


@pytest.mark.gpu
def test_a_planted_wait_is_named_with_its_line() -> None:
    model = network()
    loop = hotloop.Loop(model, adam(model), nn.CrossEntropyLoss(), device="cuda", plan="plain")
    with waits() as seen:
        for batch in loop.batches(loader(rows=64)):
            loop.step(batch).item()  # planted
    (site,) = [site for site in seen.sites if site is not None and "planted" in site.code]
    assert site.file == __file__
    assert seen.sites[site] == 4


@pytest.mark.gpu
def test_losses_that_a_person_keeps_are_not_written_over() -> None:
    _, loop = losses(replace(CUDA, graph=1), epochs=1)
    kept = [loop.step(batch) for batch in loop.batches(loader())]
    assert len({float(loss) for loss in kept}) > len(kept) // 2


class Asking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch.cuda.current_stream().query()  # which is not allowed in a capture, and which nothing else tells of
        return super().forward(x)


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_everything_working() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Asking(8, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    loop = hotloop.Loop(model, adam(model), nn.CrossEntropyLoss(), device="cuda", plan=replace(CUDA, graph=1))
    current = torch.cuda.current_stream()
    with pytest.warns(PlanWarning, match=r"test_cuda_graph.py.*query"):
        seen = torch.stack([loop.step(batch) for batch in loop.batches(loader())])
    assert loop.plan.graph == 0
    assert torch.cuda.current_stream() == current
    assert seen.isfinite().all()
    torch.rand(4, device="cuda")  # the generator works on
    graphed, again = losses(replace(CUDA, graph=1))  # and so do other captures
    assert again.plan.graph == 1
    torch.testing.assert_close(graphed, losses("plain")[0], rtol=2e-4, atol=2e-5)


@pytest.mark.gpu
def test_what_a_person_changes_between_epochs_is_seen() -> None:
    """Frozen layers, modes and a loaded optimizer: a capture knows none of them, so it is made again."""

    def run(plan: Any) -> Tensor:
        model = network(0.0)
        optimizer = adam(model)
        loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device="cuda", plan=plan)
        batches = loader()
        seen = [loop.step(batch) for batch in loop.batches(batches)]
        model[0].weight.requires_grad_(False)
        model[1].eval()
        seen += [loop.step(batch) for batch in loop.batches(batches)]
        optimizer.load_state_dict(optimizer.state_dict())
        seen += [loop.step(batch) for batch in loop.batches(batches)]
        assert loop.plan.graph == (0 if plan == "plain" else 1)
        return torch.stack(seen)

    torch.testing.assert_close(run(replace(CUDA, graph=1)), run("plain"), rtol=5e-4, atol=5e-5)


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_no_memory_behind() -> None:
    def wait() -> None:
        scratch = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
        scratch[0].item()

    rates = Rates([], 1, torch.device("cuda"))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        with pytest.raises(CannotCapture), CapturedGraph(rates).capturing(torch.cuda.Stream()):
            wait()
    big = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    del big
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 32 * 2**20  # no more than a workspace


@pytest.mark.gpu
@pytest.mark.parametrize("captures_again", [False, True])
def test_after_a_capture_that_failed_graphs_draw_what_they_would_have_drawn(captures_again: bool) -> None:
    def drawn(*, fails: bool) -> list[Tensor]:
        ones, stream, rates = torch.ones(64, device="cuda"), torch.cuda.Stream(), Rates([], 1, torch.device("cuda"))
        graph = CapturedGraph(rates)
        with graph.capturing(stream):
            dropped = nn.functional.dropout(ones)
        torch.cuda.manual_seed(0)
        if fails:
            with pytest.raises(CannotCapture), CapturedGraph(rates).capturing(stream):
                nn.functional.dropout(ones).sum().item()
            if captures_again:
                rng_state = torch.cuda.get_rng_state()
                with CapturedGraph(rates).capturing(stream):
                    nn.functional.dropout(ones)
                torch.cuda.set_rng_state(rng_state)
        masks = []
        for _ in range(3):
            graph.replay()
            masks.append(dropped.clone())
        return [*masks, torch.rand(64, device="cuda")]

    after, plain = drawn(fails=True), drawn(fails=False)
    assert all(map(torch.equal, after, plain))
    assert not torch.equal(plain[0], plain[1])


@pytest.mark.gpu
def test_what_another_thread_waits_for_is_not_the_step_s() -> None:
    value = torch.ones(1, device="cuda")

    def elsewhere() -> None:
        value.item()
        torch.cuda.synchronize()

    with waits("cuda") as seen:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(seen) == 0
        value.item()
    assert len(seen) == 1
