"""`Snapshot`: what a step or a pass changes is restored to the bit."""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotloop.errors import MemoryWarning
from hotloop.values.snapshot import FIRST_LOOKS, LOOK_EVERY, PassSnapshot, Snapshot

from .same import same
from .thorough import dealt

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
        self.last = out.detach()  # an attribute that the first step adds
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


every_optimizer = pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
fresh_or_trained = pytest.mark.parametrize("trained", [False, True])


def noted(model: nn.Module, optimizer: Optimizer) -> Snapshot:
    """All of it, in a snapshot: which tensors there are, and the values that a step may write into them."""
    attributes = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *attributes]
    tensors += [leaf for leaf in tree_leaves(optimizer.state_dict()) if isinstance(leaf, Tensor)]
    return Snapshot.of([model], [optimizer]).values(tensor.detach() for tensor in tensors)


@every_optimizer
@fresh_or_trained
def test_steps_are_taken_back_to_the_bit(build: Build, trained: bool) -> None:
    model, optimizer = made(build, trained=trained)
    before = values(model, optimizer)
    snapshot = noted(model, optimizer)
    for _ in range(2):  # it can be restored more than once
        step(model, optimizer)
        step(model, optimizer)
        after = values(model, optimizer)
        for part in before:
            assert not same(after[part], before[part]), f"the step changed the {part}"
        snapshot.restore()
        assert same(values(model, optimizer), before)


def test_memory_is_handed_over_and_not_copied_back() -> None:
    """What holds addresses, such as a CUDA graph, finds them again."""
    model, optimizer = made(OPTIMIZERS["adam"], trained=True)
    snapshot = noted(model, optimizer)
    parameters = list(model.parameters())
    addresses = [(p.data_ptr(), None if p.grad is None else p.grad.data_ptr()) for p in parameters]
    before = values(model, optimizer)
    for parameter in parameters:
        parameter.data = parameter.data.clone()
    assert not {p.data_ptr() for p in parameters} & {address for address, _ in addresses}
    step(model, optimizer)
    snapshot.restore()
    assert [(p.data_ptr(), None if p.grad is None else p.grad.data_ptr()) for p in parameters] == addresses
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert same(values(model, optimizer), before)


class Counting(nn.Module):
    """Writes to one buffer, puts another in place of one, and adds one when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("exchanged", torch.zeros(2))
        self.register_buffer("later", None)
        self.register_buffer("still", torch.ones(3))
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.written += 1
        self.exchanged.mul_(2)  # the old tensor, before another takes its place
        self.exchanged = self.exchanged + 1
        if self.later is None:
            self.later = torch.zeros(1)
        self.later += torch.rand(1, generator=self.generator)
        return x


class Buffered(nn.Module):
    """Statistics that a kernel writes without a sign, as that of BatchNorm does, and no counter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, training=True)


def changeable(model: nn.Module) -> list[Any]:
    buffers = {name: (id(b), None if b is None else b.clone()) for name, b in model._buffers.items()}
    inner = [b.clone() for b in model.buffers()]
    numpy = np.random.get_state()
    own = getattr(model, "generator", torch.Generator()).get_state()
    return [buffers, inner, torch.get_rng_state(), random.getstate(), numpy[1].tolist(), numpy[2:], own]


def torch_numbers() -> None:
    torch.rand(3)


def python_numbers() -> None:
    random.random()  # noqa: S311


def numpy_numbers() -> None:
    np.random.rand()


def run_pass(snapshot: PassSnapshot, work: Callable[[], object]) -> None:
    """A pass that goes well."""
    snapshot.take()
    work()
    if snapshot.is_looking:
        snapshot.learn()


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "Counting": Counting,
    "Buffered": Buffered,
    "BatchNorm1d": lambda: nn.BatchNorm1d(3),
    "Sequential": lambda: nn.Sequential(Counting()),
}
DRAWS = {each.__name__: each for each in (torch_numbers, python_numbers, numpy_numbers)}


@pytest.mark.parametrize(
    ("work", "before"),
    dealt([*product(BUILDS, DRAWS)], [0, 1, FIRST_LOOKS, FIRST_LOOKS + 3, LOOK_EVERY], each=2),
    ids=str,
)
def test_a_pass_that_failed_has_left_nothing(work: tuple[str, str], before: int) -> None:
    """Whether the pass was looked at or not."""
    model, draw = BUILDS[work[0]](), DRAWS[work[1]]
    snapshot = PassSnapshot([model], CPU)

    def once() -> None:
        draw()
        model(torch.randn(4, 3))

    for _ in range(before):
        run_pass(snapshot, once)
    for _ in range(2):  # also twice in a row
        snapshot.take()
        noted = changeable(model)
        once()
        snapshot.restore()
        assert same(changeable(model), noted)
    once()
    assert not same(changeable(model), noted)


class Reads(TorchDispatchMode):
    """Notes how many numbers the tensors have that operations take."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sizes += [leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        return func(*args, **(kwargs or {}))


class Attribute(list):
    """A list that counts how often it is read."""

    reads = 0

    def __iter__(self) -> Iterator[Any]:
        self.reads += 1
        return super().__iter__()


def test_only_what_passes_change_is_noted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every step would pay for it."""
    asked: list[int] = []
    getstate = random.getstate
    monkeypatch.setattr(random, "getstate", lambda: asked.append(1) or getstate())
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model.register_buffer("table", torch.zeros(1000))
    model.history = Attribute([1])
    snapshot = PassSnapshot([model], CPU)
    for _ in range(FIRST_LOOKS):
        run_pass(snapshot, lambda: model(torch.zeros(2, 3)))
    assert asked
    assert model.history.reads
    asked.clear()
    model.history.reads = 0
    with Reads() as seen:
        snapshot.take()
    assert sorted(seen.sizes) == sorted(2 * [1, 3, 3]), "one count and two means, from the tensor into its copy"
    assert not asked
    assert not model.history.reads


def test_memory_that_runs_out_while_it_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.BatchNorm1d(3)
    snapshot = PassSnapshot([model], CPU)
    clone, fails = Tensor.clone, [2]

    def clone_or_not(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if fails[0]:
            fails[0] -= 1
            raise torch.OutOfMemoryError("full")
        return clone(tensor, *args, **kwargs)

    monkeypatch.setattr(Tensor, "clone", clone_or_not)
    snapshot.take()
    model(torch.randn(4, 3))
    snapshot.restore()
    assert torch.equal(model.running_mean, torch.zeros(3))
    assert fails == [0]


@pytest.mark.gpu
def test_a_pass_on_the_gpu_without_a_wait(no_waits: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).cuda()
    snapshot = PassSnapshot([model], torch.device("cuda:0"))
    x = torch.randn(8, 3, device="cuda")
    model(x)
    with no_waits():
        for _ in range(FIRST_LOOKS + 2):
            run_pass(snapshot, lambda: model(x))
    snapshot.take()
    before = [b.clone() for b in model.buffers()]
    first = model(x)
    snapshot.restore()
    assert all(map(torch.equal, model.buffers(), before))
    assert torch.equal(model(x), first), "the same dropout"


def looks(snapshot: PassSnapshot, works: Iterable[Callable[[], object]]) -> list[bool]:
    """Which of these passes, all of which go well, are looked at."""
    seen = []
    for work in works:
        snapshot.take()
        seen.append(snapshot.is_looking)
        work()
        if snapshot.is_looking:
            snapshot.learn()
    return seen


def test_passes_that_change_nothing_are_looked_at_now_and_then() -> None:
    model = nn.Linear(3, 3)
    snapshot = PassSnapshot([model], CPU)
    seen = looks(snapshot, [lambda: model(torch.zeros(2, 3))] * (LOOK_EVERY + 2))
    assert seen == [True] * FIRST_LOOKS + [False] * (LOOK_EVERY - FIRST_LOOKS) + [True, False]
    snapshot.take()
    before = torch.get_rng_state()
    torch.rand(1)  # the first pass that draws a number
    snapshot.restore()
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.warns(MemoryWarning, match="changes the rng of python, which earlier steps did not"):
        assert looks(snapshot, [python_numbers]) == [True], "the repetition of a pass that failed"
    assert looks(snapshot, [python_numbers] * FIRST_LOOKS) == [True] * (FIRST_LOOKS - 1) + [False]
    snapshot.take()  # Python's rng state is noted where it was seen to change
    assert not snapshot.is_looking
    state = random.getstate()
    python_numbers()
    snapshot.restore()
    assert random.getstate() == state
    assert looks(snapshot, [python_numbers]) == [True]


def test_values_items_and_gradients_are_noted_anew() -> None:
    weight, settings = nn.Parameter(torch.ones(2)), {"lr": 0.1, "betas": [1, 2]}
    snapshot = Snapshot().values([weight]).items([settings, settings["betas"]]).gradients([weight])
    with torch.no_grad():
        weight.add_(1)
    settings["lr"] = 0.2
    snapshot.take()
    weight.grad = torch.ones(2)
    with torch.no_grad():
        weight.add_(1)
    settings.update(lr=0.3, new=1)
    settings["betas"].append(3)
    snapshot.restore()
    assert weight.tolist() == [2.0, 2.0]
    assert weight.grad is None
    assert settings == {"lr": 0.2, "betas": [1, 2]}
