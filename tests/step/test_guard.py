"""A guarded step of an optimizer is the plain step to the bit, wherever in it memory runs out."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.device.backend import backend_of
from hotloop.errors import DoesNotFit
from hotloop.step import guard
from hotloop.step.guard import guarded_step, is_plenty
from hotloop.values.snapshot import Snapshot

from ..same import same
from ..thorough import tries

Build = Callable[[list[nn.Parameter]], Optimizer]


class Once(TorchDispatchMode):
    """Raises before one operation, and again before a later one; not where values are restored, which takes nothing."""

    is_restoring = False

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at, self.done = set(at), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.done += not Once.is_restoring
        if self.done in self.at and not Once.is_restoring:
            raise torch.OutOfMemoryError("full")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _restoring_takes_no_memory_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = Snapshot.restore

    def restoring(snapshot: Snapshot) -> None:
        Once.is_restoring = True
        try:
            restore(snapshot)
        finally:
            Once.is_restoring = False

    monkeypatch.setattr(Snapshot, "restore", restoring)
    monkeypatch.setattr(guard, "clear", lambda device: None)  # it takes long, with all that tests import


def with_options(name: str, **options: Any) -> Build:
    return lambda weights: getattr(torch.optim, name)(weights, **{"lr": 0.01, **options})


def in_groups(weights: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(
        [{"params": weights[:2], "lr": 0.1}, {"params": weights[2:], "weight_decay": 0.3, "foreach": True}], 0.01
    )


class Own(Optimizer):
    """Somebody's own: it counts its steps in the group, and keeps a list."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.01, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for weight in group["params"]:
                if weight.grad is not None:
                    history = self.state[weight].setdefault("history", [])
                    history.append(weight.grad.clone())
                    history[0].mul_(0.9)
                    weight.sub_(sum(history) * group["lr"] / group["k"])


OPTIMIZERS: dict[str, Build] = {
    **{
        name: with_options(name)
        for name in (
            *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
            *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
        )
    },
    **{
        f"{name}, foreach": with_options(name, foreach=True)
        for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
    "Adam, fused": with_options("Adam", fused=True, amsgrad=True),
    "Adagrad, fused": with_options("Adagrad", fused=True),
    "SGD, nesterov": with_options("SGD", momentum=0.9, nesterov=True),
    "SGD, nesterov, foreach": with_options("SGD", momentum=0.9, nesterov=True, foreach=True),
    "SGD, decay, maximize, fused": with_options("SGD", momentum=0.9, weight_decay=0.1, maximize=True, fused=True),
    "RMSprop, centred": with_options("RMSprop", centered=True, momentum=0.5),
    "a rate that is a tensor": with_options("Adam", lr=torch.tensor(0.01), foreach=False),
    "in groups": in_groups,
    "somebody's own": Own,
}


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 4), (4,), (3, 3), (2, 6), ()]
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    made[1].requires_grad_(False)  # one that does not learn
    return made


def with_gradients(made: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in made:
        if weight.requires_grad:
            weight.grad = torch.randn(weight.shape, generator=generator)


def left_by(optimizer: Optimizer, made: list[nn.Parameter]) -> list[Any]:
    return [[w.detach() for w in made], [w.grad for w in made], optimizer.state_dict()]


def run(build: Build, steps: int, step: Callable[[Optimizer], None]) -> list[Any]:
    made = weights()
    optimizer = build(made)
    for number in range(steps):
        with_gradients(made, number)
        step(optimizer)
    return left_by(optimizer, made)


def guarded(optimizer: Optimizer) -> None:
    guarded_step(optimizer, optimizer.step)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("part", [guard.PART, 40])
def test_guarded_and_plain_are_the_same(name: str, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "PART", part)
    assert same(run(OPTIMIZERS[name], 4, guarded), run(OPTIMIZERS[name], 4, lambda o: o.step()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_memory_may_run_out_anywhere_in_it(name: str) -> None:
    expected = run(OPTIMIZERS[name], 3, lambda o: o.step())
    counter = Once()
    with counter:
        run(OPTIMIZERS[name], 3, guarded)
    dice = random.Random(name)  # noqa: S311
    places = sorted(dice.sample(range(1, counter.done), min(counter.done - 1, tries(3, 12))))
    for place in places:
        made = weights()
        optimizer = OPTIMIZERS[name](made)
        once = Once(place, place + 15)
        for number in range(3):
            with_gradients(made, number)
            with once:
                guarded(optimizer)
        assert same(left_by(optimizer, made), expected)
    assert [len(group["params"]) for group in optimizer.param_groups] in ([5], [2, 3]), "the groups are whole again"


@pytest.mark.parametrize("fused", [False, True])
def test_with_a_scaler_gradients_are_unscaled_once(fused: bool) -> None:
    results = []
    for place in (None, *range(1, 60, 4)):
        made = weights()
        optimizer = torch.optim.Adam(made, 0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.zeros(()))
        with_gradients(made, 0)
        for weight in made:
            if weight.grad is not None:
                weight.grad *= 1024
        scaler.unscale_(optimizer) if not fused else None
        if place is not None:
            once, plain = Once(place), optimizer.step

            def step(once: Once = once, plain: Any = plain, optimizer: Any = optimizer) -> None:
                with once:
                    guarded_step(optimizer, plain)

            optimizer.step = step
        scaler.step(optimizer)
        results.append([w.detach() for w in made])
    for result in results[1:]:
        assert same(result, results[0])


def test_sparse_gradients() -> None:
    def trained(step: Callable[[Optimizer], None], *places: int) -> list[Any]:
        torch.manual_seed(0)
        table = nn.Embedding(6, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
        once = Once(*places)
        for number in range(3):
            optimizer.zero_grad()
            table(torch.tensor([number, number + 1, number])).square().sum().backward()
            with once:
                step(optimizer)
        return [table.weight.detach(), table.weight.grad.to_dense(), optimizer.state_dict()]

    expected = trained(lambda o: o.step())
    for place in range(1, 60, 5):
        assert same(trained(guarded, place), expected)


def test_hooks_are_called_once_for_a_step() -> None:
    made = weights()
    optimizer = torch.optim.SGD(made, 0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    with_gradients(made, 0)
    guarded(optimizer)
    assert calls == ["before", "after"]
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("anyone's"))
    try:
        others = weights()
        second = torch.optim.SGD([{"params": others[:2]}, {"params": others[2:]}], 0.1)
        with_gradients(others, 0)
        guarded(second)
    finally:
        handle.remove()
    assert calls.count("anyone's") == 1


def test_an_optimizer_that_never_fits_leaves_the_part_that_failed_as_it_was() -> None:
    made = weights()
    optimizer = torch.optim.Adam(made, 0.1)
    before = [w.detach().clone() for w in made]
    with_gradients(made, 0)

    def never() -> None:
        with torch.no_grad():
            made[0].add_(1)
        raise torch.OutOfMemoryError("full")

    with pytest.raises(DoesNotFit, match=r"some of them may be updated[\s\S]*fix: go on from a checkpoint"):
        guarded_step(optimizer, never)
    assert same([w.detach() for w in made], before)


class Foreign(torch.optim.SGD):
    """An optimizer of another package, of which nobody knows what it allocates."""


def test_memory_is_plenty_only_for_optimizers_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(24))]
    ours, device = torch.optim.Adam(made), torch.device("cuda")
    monkeypatch.setattr(backend_of(device), "free_memory", lambda: 16 * 4096 + 1)
    assert is_plenty([ours], device)
    assert not is_plenty([ours, ours], device), "both allocate"
    assert not is_plenty([Foreign(made)], device)
    ours.register_step_pre_hook(lambda *_: None)
    assert not is_plenty([ours], device), "so may a hook"


def test_main_memory_is_plenty_where_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    adam, cpu = torch.optim.Adam([nn.Parameter(torch.zeros(1000))]), torch.device("cpu")
    assert is_plenty([adam], cpu)
    monkeypatch.setattr("hotloop.step.guard.main_memory_left", lambda: 16 * 4000)
    assert not is_plenty([adam], cpu)
