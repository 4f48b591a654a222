"""`State`: what a step changes can be copied aside and put back to the bit, and copies are worlds of their own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.state import CannotCopy, State

CPU = torch.device("cpu")


class Everything(nn.Module):
    """All that a step may change: weights, shared ones, frozen ones, buffers, numbers, words and loose tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.head = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.head.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))  # its gradient stays None
        self.calls = 0
        self.mood = "fresh"
        self.mean = torch.zeros(4)  # no buffer, and another tensor after each step
        self.sum = torch.zeros(4)  # written in place

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mood = "tired"
        out, _ = self.rnn(self.norm(self.conv(x)).flatten(2).transpose(1, 2))
        self.mean = self.mean * 0.9 + out.detach().mean((0, 1)) * 0.1
        self.sum += out.detach().sum((0, 1))
        return self.frozen(self.tied(nn.functional.dropout(self.head(out.mean(1)), 0.1)))


Build = Callable[[nn.Module], Optimizer]
OPTIMIZERS: dict[str, Build] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
    "adam": lambda m: torch.optim.Adam(m.parameters(), 0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), torch.tensor(0.01), amsgrad=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.01),
    "lists of tensors": lambda m: torch.optim.LBFGS([p for p in m.parameters() if p.requires_grad], 0.1, max_iter=2),
}


def step(model: nn.Module, optimizer: Optimizer, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(5, 3, 4, 4, generator=generator), torch.randn(5, 4, generator=generator)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.mse_loss(model(x), y)
        value.backward()
        return value

    optimizer.step(loss)
    for group in optimizer.param_groups:
        group["lr"] *= 0.9  # as a schedule would; a tensor is written in place


def made(build: Build, *, trained: bool) -> tuple[Everything, Optimizer]:
    torch.manual_seed(0)
    model = Everything()
    optimizer = build(model)
    if trained:
        step(model, optimizer, seed=1)
        step(model, optimizer, seed=2)
    return model, optimizer


def cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: cloned(item) for key, item in value.items()}
    return [cloned(item) for item in value] if isinstance(value, list | tuple) else value


def values(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """All of it at this moment, copied by other means than those that are tested."""
    plain = (int, float, bool, str, Tensor, type(None))
    return cloned(
        {
            "weights": model.state_dict(),
            "gradients": {name: p.grad for name, p in model.named_parameters()},
            "attributes": {
                f"{name}.{key}": value
                for name, module in model.named_modules()
                for key, value in vars(module).items()
                if isinstance(value, plain)
            },
            "optimizer": optimizer.state_dict(),
        }
    )


def same(a: Any, b: Any) -> bool:
    """Equal to the bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


every_optimizer = pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
fresh_or_trained = pytest.mark.parametrize("trained", [False, True])


@every_optimizer
@fresh_or_trained
def test_a_step_on_a_copy_leaves_the_original_to_the_bit(build: Build, trained: bool) -> None:
    model, optimizer = made(build, trained=trained)
    before = values(model, optimizer)
    original = State.of([model], [optimizer])
    original.copy().put()
    assert same(values(model, optimizer), before), "a copy holds the same values"
    step(model, optimizer)
    step(model, optimizer)
    after = values(model, optimizer)
    for part in before:
        assert not same(after[part], before[part]), f"the step changed the {part}"
    original.put()
    assert same(values(model, optimizer), before)


@every_optimizer
def test_the_training_goes_on_as_if_nothing_had_been(build: Build) -> None:
    results = []
    for disturbed in (False, True):
        model, optimizer = made(build, trained=True)
        if disturbed:
            original = State.of([model], [optimizer])
            original.copy().put()
            step(model, optimizer, seed=8)
            original.put()
        torch.manual_seed(5)
        step(model, optimizer, seed=9)
        step(model, optimizer, seed=10)
        results.append(values(model, optimizer))
    assert same(*results)


@every_optimizer
@fresh_or_trained
def test_copies_do_not_influence_each_other(build: Build, trained: bool) -> None:
    model, optimizer = made(build, trained=trained)
    before = values(model, optimizer)
    original = State.of([model], [optimizer])
    first, second = original.copy(), original.copy()
    first.put()
    torch.manual_seed(7)
    step(model, optimizer, seed=3)
    first, trained_first = State.of([model], [optimizer]), values(model, optimizer)
    second.put()
    assert same(values(model, optimizer), before)
    torch.manual_seed(7)
    step(model, optimizer, seed=3)
    assert same(values(model, optimizer), trained_first), "the same step from the same state gives the same state"
    step(model, optimizer, seed=4)
    first.put()
    assert same(values(model, optimizer), trained_first)
    original.put()
    assert same(values(model, optimizer), before)


def test_a_copy_of_a_copy() -> None:
    model, optimizer = made(OPTIMIZERS["adam"], trained=True)
    before = values(model, optimizer)
    original = State.of([model], [optimizer])
    start = original.copy()
    start.copy().put()
    step(model, optimizer)
    start.copy().put()
    assert same(values(model, optimizer), before)


def test_memory_is_handed_over_and_not_copied_back() -> None:
    """What holds addresses, such as a recording, finds them again."""
    model, optimizer = made(OPTIMIZERS["adam"], trained=True)
    original = State.of([model], [optimizer])
    parameters = list(model.parameters())
    addresses = [(p.data_ptr(), None if p.grad is None else p.grad.data_ptr()) for p in parameters]
    original.copy().put()
    assert not {p.data_ptr() for p in parameters} & {address for address, _ in addresses}
    step(model, optimizer)
    original.put()
    assert [(p.data_ptr(), None if p.grad is None else p.grad.data_ptr()) for p in parameters] == addresses
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_tied_weights_stay_tied_in_a_copy() -> None:
    model, optimizer = made(OPTIMIZERS["sgd"], trained=False)
    State.of([model], [optimizer]).copy().put()
    step(model, optimizer)
    assert model.tied.weight is model.head.weight
    assert [w.data_ptr() for w in model.rnn._flat_weights] == [w.data_ptr() for w in model.rnn.parameters()]


class Flat(nn.Module):
    """Weights that are parts of one flat tensor, as the GPU wants those of an RNN, and one that is seen transposed."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.arange(12.0)
        self.first = nn.Parameter(flat[:4].view(2, 2))
        self.second = nn.Parameter(flat[4:8])
        self.turned = nn.Parameter(flat[:4].view(2, 2).t())
        self.register_buffer("flat", flat)


def test_weights_that_share_memory_share_it_in_a_copy_and_nothing_else_does() -> None:
    model = Flat()
    original = State.of([model], [])
    original.copy().put()
    assert same(model.turned.detach(), model.first.detach().t())
    assert same(model.flat, torch.arange(12.0))
    with torch.no_grad():
        model.first.fill_(-1)
        model.flat[4:] += 100
    assert same(model.turned.detach(), torch.full((2, 2), -1.0))
    assert same(model.second.detach(), torch.arange(104.0, 108.0))
    original.put()
    assert same(model.flat, torch.arange(12.0))


def test_two_modules_with_one_weight_between_them() -> None:
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.weight = a.weight
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (a, b)]
    original = State.of([a, b], optimizers)
    weight = a.weight.detach().clone()
    original.copy().put()
    for module, optimizer in zip((a, b), optimizers, strict=True):
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert a.weight is b.weight
    assert not same(a.weight.detach(), weight)
    original.put()
    assert same(b.weight.detach(), weight)
    assert all(not optimizer.state for optimizer in optimizers)


@fresh_or_trained
def test_channels_last_keeps_the_values(trained: bool) -> None:
    model, optimizer = made(OPTIMIZERS["momentum"], trained=trained)
    before = values(model, optimizer)
    original = State.of([model], [optimizer])
    original.copy().laid_out(torch.channels_last).put()
    assert same(values(model, optimizer), before)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    if trained:
        for laid in (model.conv.weight.grad, optimizer.state[model.conv.weight]["momentum_buffer"]):
            assert laid.is_contiguous(memory_format=torch.channels_last)
    torch.manual_seed(5)
    step(model, optimizer)
    relaid = model.conv.weight.detach().clone()
    original.put()
    assert same(values(model, optimizer), before)
    assert model.conv.weight.is_contiguous()
    torch.manual_seed(5)
    step(model, optimizer)
    torch.testing.assert_close(model.conv.weight.detach(), relaid)


class Averaging(nn.Module):
    """A buffer that is not written but replaced, as an average is often kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return out


def test_a_buffer_that_a_step_replaces_comes_back() -> None:
    model = Averaging()
    buffer = model.mean
    original = State.of([model], [])
    original.copy().put()
    model(torch.ones(4, 3))
    original.put()
    assert same(model.mean, torch.zeros(2))
    assert model.mean is buffer


class Remembering(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x).detach()
        return self.last


def test_an_attribute_that_a_step_adds_is_gone_again() -> None:
    model = Remembering(2, 2)
    original = State.of([model], [])
    original.copy().put()
    model(torch.ones(1, 2))
    original.put()
    assert not hasattr(model, "last")


class Labelled(Tensor):
    """A tensor of a class of its own."""


UNUSUAL: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.zeros(3, device="meta"),
    "of another class": lambda: torch.zeros(3).as_subclass(Labelled),
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("where", ["buffer", "attribute", "gradient", "optimizer"])
def test_what_has_no_plain_memory_is_refused(make: Callable[[], Tensor], where: str) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if where == "buffer":
        model.register_buffer("odd", make())
    elif where == "attribute":
        model.odd = make()
    elif where == "optimizer":
        optimizer.state[model.weight]["odd"] = make()
    else:
        odd = make()
        parameter = nn.Parameter(torch.zeros(odd.shape, device=odd.device))
        parameter.grad = odd
        optimizer.add_param_group({"params": [parameter]})
    state = State.of([model], [optimizer])
    with pytest.raises(CannotCopy):
        state.copy()


def test_the_gradient_of_a_sparse_embedding_is_refused() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    state = State.of([model], [])
    state.copy()
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(CannotCopy, match="sparse"):
        State.of([model], []).copy()


def test_weights_that_have_no_size_yet_are_refused() -> None:
    with pytest.raises(CannotCopy):
        State.of([nn.LazyLinear(3)], []).copy()


def test_the_bytes_of_a_copy() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    weights = 4 * (4 * 3 + 3)
    assert State.of([model], [optimizer]).nbytes == weights
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert State.of([model], [optimizer]).nbytes == 2 * weights
