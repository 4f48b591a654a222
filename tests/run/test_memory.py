"""Out of memory in the middle of a step: nothing is lost, nothing counts twice, and the training is the same."""

import gc
import random
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # which torch would load in the middle of a test
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop import Loop
from hotloop.errors import BadArgument, DoesNotFit, MemoryWarning, PlanWarning
from hotloop.step import portion
from hotloop.step.eager import FIRST_UPDATES, EagerStep, Update
from hotloop.step.portion import Portion
from hotloop.step.retry import OutOfMemory
from hotloop.step.trained_objectives import TrainedObjective
from hotloop.step.training import TrainingStep

from ..same import same
from ..thorough import tries

WHOLE = 10**9  # items at once: all of any batch
BATCH, SEED = 8, 20
PHASES = ("forward", "backward", "optimizer")
Batch = tuple[Tensor, Tensor, Tensor]
pytestmark = pytest.mark.usefixtures("light_heap")


class Faults(TorchDispatchMode):
    """Raises `OutOfMemoryError` before an operation of a phase that is chosen at random; at most once in an attempt."""

    def __init__(self, seed: int, often: dict[str, float], may_fail: Callable[[str], bool]) -> None:
        super().__init__()
        self.dice = random.Random(seed)  # noqa: S311
        self.often, self.may_fail = often, may_fail
        self.phase: str | None = None
        self.hits: Counter[str] = Counter()
        self.failed: Callable[[], None] = lambda: None
        self.pieces: Callable[[], int] = lambda: 1  # in the next attempt
        self._length = dict.fromkeys(PHASES, 20)  # operations of a phase, as it was the last time
        self._done = 0
        self._left: int | None = None

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        self._done, self._left = 0, None
        often = self.often[phase] / (1 if phase == "optimizer" else self.pieces())
        if self.may_fail(phase) and self.dice.random() < often:
            self._left = self.dice.randrange(self._length[phase])
        try:
            yield
        finally:
            self._length[phase] = max(self._done, 1)
            self.phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.phase is not None and func is not torch.ops.aten._local_scalar_dense.default:  # it takes no memory
            self._done += 1
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    self._left = None
                    self.hits[self.phase] += 1
                    if self.phase != "optimizer":
                        self.failed()
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB, says the test")
        return func(*args, **(kwargs or {}))


class Noting(Portion):
    """Notes the sizes that went well."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.taken: list[int] = []
        self._last = 0

    def of(self, items: int) -> int:
        self._last = super().of(items)
        return self._last

    def went_well(self, passes: int = 1) -> bool:
        self.taken.append(WHOLE if self.limit is None else self._last)
        return super().went_well(passes)


class Scripted(Portion):
    """Takes the sizes that it is told."""

    def __init__(self) -> None:
        super().__init__(WHOLE)
        self.script: list[int] = []

    def of(self, items: int) -> int:
        return min(items, self.script.pop(0)) if self.script else items


def data(rows: int = 103) -> TensorDataset:
    """A prime number of rows, so that every batch size leaves a tail; each with its number."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 6, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1), torch.arange(rows))


def plain_network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def random_network() -> nn.Module:
    """Dropout and batch normalisation."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12, track_running_stats=True), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3)
    )


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def adam(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3, **options)


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.02, **{"momentum": 0.9, **options})


class Run:
    """Training that is watched: what it learnt from in each step, and in pieces of which size."""

    def __init__(self, optimizer: Callable[[nn.Module], Optimizer], portion: Portion, **settings: Any) -> None:
        self.model = plain_network()
        self.optimizer = optimizer(self.model)
        self.seen: list[int] = []  # in the attempt that is under way
        self.during: Callable[[str], AbstractContextManager[Any]] = nullcontext
        # Weighed by items: else the first cuts are compared with the whole batch, which calls the objective again.
        plan = hotloop.Plan("cpu", stream="direct", split="items", **settings)
        self.loop = Loop(self.model, self.optimizer, objective=self._watched, device="cpu", plan=plan)
        self.loop._core.switch.memory.portion = portion
        self.loader = DataLoader(data(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))

    def _watched(self, model: nn.Module, batch: Batch) -> Tensor:
        self.seen += batch[2].tolist()
        with self.during("forward"):
            return classify(model, batch)

    def result(self) -> dict[str, Any]:
        """Everything that the training has left."""
        loop = self.loop
        return {
            "weights": self.model.state_dict(),
            "gradients": [p.grad for p in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "scalers": loop._core.switch.step.state.state_dict()["scalers"],
            "counts": (loop.steps, loop.skipped, loop._core.watch.batches),
            "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
            "loss": loop._core.watch.latest,
        }


@contextmanager
def phases_marked(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def marked(call: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with faults.during(phase):
                return call(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch, warnings.catch_warnings(), faults:
        warnings.simplefilter("ignore", MemoryWarning)
        patch.setattr(EagerStep, "__call__", marked(EagerStep.__call__, "forward"))
        patch.setattr(Tensor, "backward", marked(Tensor.backward, "backward"))
        patch.setattr(Update, "__call__", marked(Update.__call__, "optimizer"))
        yield


def seed_everything() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def with_faults(
    run: Run, noting: Noting, epochs: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[list[int]], Faults]:
    """Memory runs out at random; returns the sizes of the pieces in each step."""

    def may_fail(phase: str) -> bool:
        if phase == "optimizer":  # one that never ran out of memory before cannot be restored
            return run.loop.steps + run.loop.skipped < FIRST_UPDATES or noting.is_tight
        return noting.limit is None or noting.limit > 1

    faults = Faults(seed, {"forward": 0.3, "backward": 0.3, "optimizer": 0.3}, may_fail)
    faults.failed, run.during = run.seen.clear, faults.during
    faults.pieces = lambda: -(-BATCH // noting.limit) if noting.limit else 1
    sizes = []
    seed_everything()
    with phases_marked(faults, monkeypatch):
        for _ in range(epochs):
            epoch: list[int] = []
            for batch in run.loop.batches(run.loader):
                noting.taken.clear()
                run.seen.clear()
                run.loop.step(batch)
                taken = [min(size, len(batch[0])) for size in noting.taken]  # since memory first ran out
                sizes.append(taken or [len(batch[0])])
                assert run.seen == batch[2].tolist(), f"seed {seed}: each item once, in order"
                epoch += batch[2].tolist()
            assert sorted(epoch) == list(range(103)), f"seed {seed}"
    return sizes, faults


def without_faults(run: Run, scripted: Scripted, epochs: int, sizes: list[list[int]]) -> Run:
    """The same training in the same pieces."""
    rest = iter(sizes)
    seed_everything()
    for _ in range(epochs):
        for batch in run.loop.batches(run.loader):
            scripted.script = list(next(rest))
            run.loop.step(batch)
    return run


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that grow back at once, so that all sizes come up."""
    monkeypatch.setattr(Portion, "_patience", 2)
    monkeypatch.setattr(portion, "MOST_GOOD_PASSES", 4)


# Other models and objectives run out of memory in the zoo, and every optimizer in `tests/step/test_guard.py`.
TRAININGS: dict[str, tuple[Callable[[nn.Module], Optimizer], dict[str, Any]]] = {
    "fp32": (adam, {}),
    "fp16, clipped, accumulated": (adam, {"precision": "fp16", "clip_norm": 0.5, "accumulate": 3}),
    "bf16, foreach": (partial(sgd, foreach=True), {"precision": "bf16"}),
}


@pytest.mark.usefixtures("restless")
@pytest.mark.parametrize("name", TRAININGS)
def test_many_steps_of_which_a_third_run_out_of_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (optimizer, settings), epochs, noting, scripted = TRAININGS[name], tries(3, 30), Noting(), Scripted()
    ours = Run(optimizer, noting, **settings)
    sizes, faults = with_faults(ours, noting, epochs, SEED, monkeypatch)
    said = f"seed {SEED}, {faults.hits}"
    print(said)
    steps = 13 * epochs
    assert len(sizes) == steps
    assert sum(faults.hits.values()) >= steps / 3, said
    assert all(faults.hits[phase] >= 2 for phase in PHASES), said
    assert {size for each in sizes for size in each} >= {1, 2, 4, 8}, said
    assert ours.loop.out_of_memory == faults.hits["forward"] + faults.hits["backward"]
    if not settings:
        assert {int(state["step"]) for state in ours.optimizer.state.values()} == {steps}, "one update for each batch"
    theirs = without_faults(Run(optimizer, scripted, **settings), scripted, epochs, sizes)
    assert same(ours.result(), theirs.result()), said


class Picky(nn.Module):
    """A network that runs out of memory with more than so many items at once."""

    def __init__(self, inner: nn.Module, most: float, *, backward: bool = False) -> None:
        super().__init__()
        self.inner, self.most, self.backward = inner, most, backward
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        out = self.inner(x)
        if len(x) > self.most:
            if not self.backward:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            out.register_hook(_run_out)
        return out


def _run_out(gradient: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory in the backward pass")


def loop_of(model: nn.Module, optimizer: Callable[[nn.Module], Optimizer] = sgd, **options: Any) -> Loop:
    options.setdefault("loss", nn.CrossEntropyLoss())
    return Loop(model, optimizer(model), device="cpu", plan=options.pop("plan", "plain"), **options)


def batches(count: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(size, 6, generator=generator) for _ in range(count)]
    return [(x, x[:, :3].argmax(1)) for x in inputs]


class Mark:
    """Lives as long as what an operation has kept for its backward pass."""


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Mark) -> Tensor:
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@pytest.mark.filterwarnings("ignore:.*your code changes")  # the lists below
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("before", [0, 5])
def test_what_failed_is_let_go_before_the_batch_is_repeated(before: int, backward: bool) -> None:
    """Else there would be no more memory than before: neither the graph nor the traceback may live on."""
    held: list[weakref.ref[Mark]] = []
    alive: list[bool] = []

    def objective(model: Picky, batch: tuple[Tensor, Tensor]) -> Tensor:
        alive.extend(ref() is not None for ref in held)
        held.clear()
        mark = Mark()
        held.append(weakref.ref(mark))
        out = Marked.apply(model.inner(batch[0]), mark)
        if len(out) > model.most:
            if not backward:
                raise torch.OutOfMemoryError("CUDA out of memory")
            out.register_hook(_run_out)
        return F.cross_entropy(out, batch[1])

    model = Picky(plain_network(), 8)
    loop = loop_of(model, loss=None, objective=objective)
    for batch in batches(before):
        loop.step(batch)
    model.most = 4
    alive.clear()
    held.clear()
    with pytest.warns(
        MemoryWarning, match="out of memory with 8 items at once: batches are computed in micro-batches of 4"
    ):
        loop.step(batches(1)[0])
    assert len(alive) >= 2
    assert not any(alive)
    assert loop.plan.micro_batch == 4


def test_an_error_of_another_kind_leaves_a_window_as_it_was() -> None:
    """A batch that is refused is not in the window, and what was there still is."""
    results = []
    for refused in (False, True):
        model = plain_network()
        loop = loop_of(model, accumulate=2)
        first, second = batches(2)
        loop.step(first)
        if refused:
            with pytest.raises(ValueError, match="mine"):
                loop.step((first[0], _Refusing()))
        loop.step(second)
        results.append([p.detach().clone() for p in model.parameters()])
        assert loop.steps == 1
    assert same(*results), "after a batch that was refused"


class _Refusing:
    def __getattr__(self, name: str) -> Any:
        raise ValueError("mine")


def test_a_batch_that_does_not_fit_for_good_leaves_its_window_as_it_was() -> None:
    model = Picky(plain_network(), 8)
    loop = loop_of(model, accumulate=3)
    first, second, third = batches(3)
    loop.step(first)
    before = [p.grad.clone() for p in model.parameters()]
    random_state = torch.get_rng_state()
    model.most = 0
    with pytest.warns(MemoryWarning), pytest.raises(DoesNotFit, match="a single item does not fit"):
        loop.step(second)
    assert same([p.grad for p in model.parameters()], before), "gradients"
    assert torch.equal(torch.get_rng_state(), random_state)
    model.most = 8
    loop.step(second)
    loop.step(third)
    assert loop.steps == 1


def test_what_fills_the_memory_is_said_where_nothing_helps() -> None:
    loop = loop_of(Picky(plain_network(), 0), adam)
    with pytest.warns(MemoryWarning), pytest.raises(DoesNotFit) as caught:
        loop.step(batches(1)[0])
    said = str(caught.value)
    for words in ("a single item does not fit", "parameters ", "optimizer state ", "allocate 2.00 GiB", "fix:"):
        assert words in said, words


class Stack(nn.Module):
    """Blocks that repeat; their activations are too much for memory, unless they are computed again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if not any("forward" in vars(block) for block in self.blocks):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.head(x)


def test_activations_are_computed_again_where_a_single_item_does_not_fit() -> None:
    loop = loop_of(Stack())
    with pytest.warns(MemoryWarning):
        loop.step(batches(1)[0])
    assert loop.plan.checkpointing
    assert loop.plan.micro_batch == 1
    assert loop.steps == 1


class Shaking(nn.Module):
    """A block that draws numbers of Python and of NumPy, and counts how often it is called in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.inner(x).tanh() * (1 + random.random() + float(np.random.rand()))  # noqa: S311


def test_what_is_computed_again_draws_the_same_numbers() -> None:
    """Memory may run out in any model, so that checkpointing must be right in any."""
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(Shaking(), Shaking(), Shaking(), nn.Linear(6, 3))
        blocks = nn.Sequential(nn.Sequential(*model[:3]), model[3])
        loop = loop_of(blocks, plan=hotloop.Plan("cpu", checkpointing=checkpointing))
        seed_everything()
        for batch in batches(3):
            loop.step(batch)
        results.append([blocks.state_dict(), random.getstate(), np.random.get_state()[1].tolist()])
    assert results[0][0]["0.0.calls"] == 3
    assert same(*results), "with and without"


def test_batch_normalisation_that_is_left_with_one_item_says_so() -> None:
    model = Picky(random_network(), 1)
    with pytest.warns(MemoryWarning), pytest.raises(DoesNotFit, match="cannot learn from one alone"):
        loop_of(model).step(batches(1, size=4)[0])


def test_micro_batches_of_one_item_are_not_blamed_on_the_memory() -> None:
    loop = loop_of(random_network(), micro_batch=1)
    words = r"micro_batch=1 leaves one item by itself"
    with pytest.warns(PlanWarning, match="batch normalisation"), pytest.raises(BadArgument, match=words):
        loop.step(batches(1, size=4)[0])


def test_only_micro_batches_of_one_size_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []

    def compiling(objective: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
        def counting(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            compiled.append(len(batch[0]))
            return objective(model, batch)

        return counting

    monkeypatch.setattr(torch, "compile", compiling)
    model = Picky(plain_network(), 5)
    trained = TrainedObjective("loss", classify, (sgd(model),))
    memory = OutOfMemory([model], torch.device("cpu"))
    step = TrainingStep(model, (trained,), hotloop.Plan("cpu", compile="default"), memory=memory)
    step(batches(1, size=9)[0])
    assert model.sizes == [5, 4]  # what the failed attempt noted is restored
    assert compiled == [9, 5]


def test_weights_that_two_optimizers_share_learn_from_each_gradient_once() -> None:
    def shared(model: nn.Module) -> Any:
        return [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.1)]

    results = []
    for window in (1, 2):
        model = plain_network()
        loop = loop_of(model, shared, accumulate=window)
        whole = batches(1)[0]
        halves = [(x, y) for x, y in zip(whole[0].chunk(2), whole[1].chunk(2), strict=True)]
        for batch in [whole] if window == 1 else halves:
            loop.step(batch)
        results.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*results)


CUDA_MIB = 2**20


def big(rows: int = 512) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 64, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


class Wide(nn.Module):
    """About 16 MiB for each item."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.spread, self.head = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.spread(x)[:, None, :].repeat(1, 2**14, 1).tanh().sigmoid().mean(1))


@contextmanager
def capped(mebibytes: int) -> Iterator[None]:
    """The memory of the GPU, as far as this process may take it."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + mebibytes * CUDA_MIB) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def wide_loop(plan: hotloop.Plan) -> Loop:
    model = Wide()
    return Loop(model, torch.optim.Adam(model.parameters(), 1e-3), nn.CrossEntropyLoss(), device="cuda", plan=plan)


def losses_of(loop: Loop, epochs: int) -> list[float]:
    loader = DataLoader(big(), 64, shuffle=True, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(7)
    return [epoch.loss for epoch in loop.fit(loader, epochs=epochs, progress=False).epochs]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::hotloop.errors.MemoryWarning")
@pytest.mark.parametrize(
    "plan",
    [
        hotloop.Plan("cuda:0"),
        hotloop.Plan("cuda:0", graph=1),
        hotloop.Plan("cuda:0", graph=16, stream="resident"),
        hotloop.Plan("cuda:0", precision="fp16"),
    ],
    ids=["eager", "graph", "several", "fp16"],
)
def test_survival_on_a_gpu_that_is_too_small(plan: hotloop.Plan) -> None:
    free = losses_of(wide_loop(plan), 4)
    loop = wide_loop(plan)
    with capped(400):  # 64 items would take a GiB
        tight = losses_of(loop, 4)
    assert loop.out_of_memory > 0
    assert loop.plan.micro_batch is not None
    assert loop.steps + loop.skipped == 4 * 8
    torch.testing.assert_close(tight, free, rtol=2e-3, atol=2e-4)


def heavy() -> nn.Module:
    """128 MiB of weights; next to nothing for the items."""
    torch.manual_seed(2)
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8))).cuda()


def by_loop(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    loop = Loop(model, optimizer, nn.MSELoss(), device="cuda", plan=hotloop.Plan("cuda:0"))
    for _ in range(FIRST_UPDATES):
        loop.step(batch)


def by_hand(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    for _ in range(FIRST_UPDATES):
        optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()


def first_updates(train: Callable[[nn.Module, tuple[Tensor, Tensor]], None]) -> tuple[float, list[Tensor]]:
    """The peak of the first updates in MiB, and the weights that they left."""
    model, batch = heavy(), (torch.ones(4, 2048, device="cuda"), torch.zeros(4, 2048, device="cuda"))
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(model, batch)
    return (torch.cuda.max_memory_allocated() - before) / 2**20, [w.detach().cpu() for w in model.parameters()]


@pytest.mark.gpu
def test_the_first_updates_take_what_the_optimizer_takes_where_there_is_plenty() -> None:
    plain, expected = first_updates(by_hand)
    peak, weights = first_updates(by_loop)
    assert peak < plain + 2
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_the_first_updates_need_no_more_than_they_leave_where_there_is_little() -> None:
    plain, expected = first_updates(by_hand)  # with temporaries of the whole
    with capped(round(128 + plain - 24)):  # the weights are new as well
        with pytest.raises(torch.OutOfMemoryError):
            first_updates(by_hand)
        torch.cuda.empty_cache()
        _, weights = first_updates(by_loop)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::hotloop.errors.MemoryWarning")
@pytest.mark.parametrize("graph", [0, 1])
def test_pieces_grow_back_when_there_is_more_room(graph: int) -> None:
    loop = wide_loop(hotloop.Plan("cuda:0", graph=graph))
    with capped(400):
        losses_of(loop, 1)
        assert loop.plan.micro_batch is not None
    failures = loop.out_of_memory
    losses_of(loop, 40)  # 320 steps: it doubles after 50
    assert loop.plan.micro_batch is None
    assert loop.out_of_memory == failures


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::hotloop.errors.MemoryWarning")
@pytest.mark.parametrize("graph", [0, 1])
def test_nothing_waits_for_the_gpu_because_memory_might_run_out(
    graph: int, no_waits: Callable[[], AbstractContextManager[None]]
) -> None:
    loop = wide_loop(hotloop.Plan("cuda:0", graph=graph))
    batch = tuple(t.cuda() for t in big(64).tensors)
    for _ in range(250):
        loop.step(batch)
    with no_waits():
        for _ in range(20):  # one of these passes is looked at closely
            loop.step(batch)


@pytest.mark.gpu
def test_one_item_that_does_not_fit_names_the_activations() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x[:, None, :].repeat(1, 2**19, 1).tanh().mean(1))  # 128 MiB for each item, twice

    model = Huge()
    loop = Loop(model, torch.optim.Adam(model.parameters(), 1e-3), nn.CrossEntropyLoss(), device="cuda", plan="plain")
    with (
        capped(200),
        pytest.warns(MemoryWarning),
        pytest.raises(DoesNotFit, match=r"activations \d[\s\S]*raise that share"),
    ):
        loop.step(tuple(t.cuda() for t in big(4).tensors))
