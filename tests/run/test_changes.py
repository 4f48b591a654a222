"""State in unusual places: saved, so that a resumed run is the same to the bit, or named in a warning."""

import logging
import random
import signal
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from hotloop import Loop
from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.errors import BadArgument

from ..thorough import THOROUGH, some, tries
from .conftest import at_step, signalled
from .test_state import BATCH, ITEMS, Script, assert_resumed_alike, held_out, network, points, shuffled

cross_entropy = nn.functional.cross_entropy


def scripted(
    model: nn.Module | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    objective: Any = None,
    loader: Any = None,
    stateful: Any = None,
    **more: Any,
) -> Script:
    """A script; `more` is for fit."""
    model = model or network(norm=False)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05)
    goal = {"objective": objective} if objective else {"loss": nn.CrossEntropyLoss()}
    loop = Loop(model, optimizer, device="cpu", plan="plain", stateful=stateful, **goal)
    return Script(loop, loader or shuffled(), more)


# Saved, to the bit


class Containers(nn.Module):
    """Keeps all kinds of containers, and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(norm=False)
        self.losses = [1.0]
        self.queue: deque[Tensor] = deque(maxlen=3)
        self.stats: dict[str, Any] = {"mean": torch.zeros(6), "count": 0, "nested": [(1, 2.5)]}
        self.seen = {0}
        self.hidden = (torch.zeros(2), 3)
        self.hits: Counter[int] = Counter()
        self.groups: defaultdict[str, list[int]] = defaultdict(list)
        self.order: OrderedDict[str, int] = OrderedDict()
        self.array = np.zeros(4)
        self.number = np.float64(1.5)
        self.alias = self.losses

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.losses.append(float(x.detach().mean()))
            self.queue.append(x.detach().mean(0))
            self.stats["mean"].lerp_(x.detach().mean(0), 0.1)
            self.stats["count"] += 1
            self.stats["nested"].append((self.stats["count"], 0.5))
            self.seen.add(self.stats["count"])
            self.hidden = (self.hidden[0] + 0.1, self.hidden[1] + 1)
            self.hits[self.stats["count"] % 3] += 1
            self.groups["a"].append(1)
            self.order[str(self.stats["count"])] = 1
            self.array += 0.01
            self.number = self.number * np.float64(0.99)
        shift = sum(self.queue, torch.zeros(6)) + self.stats["mean"] + float(self.hidden[0][0]) * 0.01
        scale = sum(self.losses[-5:]) + len(self.seen) + self.hits[1] + len(self.groups["a"]) + len(self.order)
        return self.inner(x - 0.1 * shift) * (1 + 0.001 * scale + float(self.array[0]) + float(self.number))


def containers() -> Script:
    return scripted(Containers())


def generator_in_a_closure() -> Script:
    generator = torch.Generator().manual_seed(3)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0] + 0.1 * torch.rand(batch[0].shape, generator=generator)), batch[1])

    return scripted(objective=objective)


class LearntNoise(nn.Module):
    """A transform that is a module, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.calls = 0

    def forward(self, batch: Any) -> Any:
        self.mean.lerp_(batch[0].mean(0), 0.1)
        self.calls += 1
        return batch[0] - self.mean + 0.001 * self.calls, batch[1]


def transform_that_is_a_module() -> Script:
    return scripted(device_transform=LearntNoise())


class Telling:
    """An objective that is an object, and tells its state."""

    def __init__(self) -> None:
        self.seen = 0
        self.history: list[float] = []
        self.box = {"inner": object()}

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen += 1
        loss = cross_entropy(model(batch[0]), batch[1])
        self.history.append(loss.item())
        return loss * min(1.0, self.seen / 20) * (1 + 0.1 * self.history[0])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "history": torch.tensor(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.history = state["seen"], state["history"].tolist()


def objective_that_tells_its_state() -> Script:
    return scripted(objective=Telling())


SAVED = [containers, generator_in_a_closure, transform_that_is_a_module, objective_that_tells_its_state]


@pytest.mark.parametrize("build", SAVED, ids=[build.__name__ for build in SAVED])
def test_a_resumed_run_is_the_same_to_the_bit(build: Callable[[], Script]) -> None:
    epochs, stops = tries(2, 3), [10] if SAVED.index(build) % 2 else [3]  # in the second epoch or in the first
    assert_resumed_alike(build, [1, 6, 10] if THOROUGH else stops, epochs)


def test_containers_are_restored_in_place(tmp_path: Path) -> None:
    first = containers()
    first.loop.fit(first.loader, save=tmp_path, progress=False)
    model = Containers()
    held = {name: value for name, value in vars(model).items() if isinstance(value, list | dict | deque | set)}
    made = scripted(model)
    made.loop.fit(made.loader, epochs=1, save=tmp_path, resume=True, progress=False)
    assert all(getattr(model, name) is value for name, value in held.items())
    assert model.alias is model.losses
    assert len(model.losses) == 1 + 8
    assert model.queue.maxlen == 3
    assert type(model.groups) is defaultdict
    assert vars(model)["hits"] == vars(first.loop.model)["hits"]


# Workers that persist


class Drawing(Dataset[Any]):
    """Items that draw from a generator of the dataset, and from the global ones."""

    def __init__(self) -> None:
        self.inputs, self.targets = points()
        self.generator = torch.Generator().manual_seed(1)
        self.parts = [np.random.default_rng(8), random.Random(2)]  # noqa: S311

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(6, generator=self.generator) + float(self.parts[0].random()) + self.parts[1].random()
        return self.inputs[index] + 0.1 * noise + 0.1 * torch.rand(6), self.targets[index]


class Blurring:
    """A collate_fn that draws from a generator of its own, and keeps nothing else."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __call__(self, items: Any) -> Any:
        inputs, targets = default_collate(items)
        return inputs + 0.1 * float(self.rng.random()), targets


def persistent_training() -> Script:
    options = {"num_workers": 2, "persistent_workers": True, "collate_fn": Blurring()}
    return scripted(loader=shuffled(dataset=Drawing(), **options))


def persistent_validation(*, own: bool, dataset: Callable[[], Dataset[Any]] = Drawing) -> Script:
    """The evaluation decides on the learning rate, so what it draws is felt; so is what it draws from others."""
    model = network(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.01, factor=0.7)
    options = {"device": "cpu", "plan": "plain", "scheduler": scheduler}
    loop = Loop(model, optimizer, nn.CrossEntropyLoss(), **options)
    validate = shuffled(own=own, dataset=dataset(), num_workers=1, persistent_workers=True)
    return Script(loop, shuffled(own=False), {"validate": validate})


PERSISTENT: dict[str, Callable[[], Script]] = {
    "training": persistent_training,
    "validation": lambda: persistent_validation(own=False),
    "validation with a generator": lambda: persistent_validation(own=True),
    "validation on constant items": lambda: persistent_validation(own=False, dataset=lambda: TensorDataset(*points())),
}


@pytest.mark.parametrize("kind", some(PERSISTENT, ["training", "validation with a generator"]))
def test_workers_that_persist_go_on_with_their_generators(kind: str) -> None:
    epochs, stops = tries(2, 3), [3, 11] if THOROUGH else [11]
    assert_resumed_alike(PERSISTENT[kind], stops, epochs)


def test_an_evaluation_with_workers_that_persist_draws_as_a_loop_by_hand() -> None:
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(*points()), BATCH, num_workers=1, persistent_workers=True)
    for _ in range(3):
        list(loader)
    by_hand = torch.rand(3)
    made = scripted(loader=[(inputs, targets) for inputs, targets in DataLoader(TensorDataset(*points()), 45)])
    made.loop.model[3].p = 0.0
    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(*points()), BATCH, num_workers=1, persistent_workers=True)
    made.loop.fit(made.loader, epochs=3, validate=loader, progress=False)
    assert torch.equal(torch.rand(3), by_hand)


# Told


class Large(Dataset[Any]):
    """A dataset with a cache that is too large for a checkpoint."""

    def __init__(self) -> None:
        self.inputs, self.targets = points()
        self.cache: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Any:
        self.cache.setdefault(index, torch.zeros(100_000))
        return self.inputs[index], self.targets[index]


def cache_in_a_dataset() -> Script:
    return scripted(loader=shuffled(dataset=Large()))


TOLD = {
    cache_in_a_dataset: r"dataset\.cache",
}


@pytest.mark.parametrize(("build", "name"), TOLD.items(), ids=[build.__name__ for build in TOLD])
def test_what_is_not_saved_is_named_once_and_again_when_the_run_goes_on(
    build: Callable[[], Script], name: str, tmp_path: Path
) -> None:
    made = build()
    options: dict[str, Any] = {"save": tmp_path, "progress": False}
    with pytest.warns(CheckpointWarning, match=f"training changes state that no checkpoint holds.*{name}") as told:
        made.loop.fit(made.loader, epochs=2, every="3 steps", **options, **made.more)
    assert len(told) == 1, "each name is told once"
    made = build()
    with pytest.warns(CheckpointWarning, match=f"had changed state that no checkpoint holds: .*{name}"):
        made.loop.fit(made.loader, epochs=3, resume=True, **options, **made.more)


class Logger:
    """What a trainer often has: its loop, its loader, its schedule, and methods that it hands over."""

    def __init__(self) -> None:
        self.model = network(norm=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.02)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=50)
        self.loader = shuffled()
        self.steps = 0
        options = {"device": "cpu", "plan": "plain", "scheduler": self.scheduler}
        self.loop = Loop(self.model, self.optimizer, objective=self.objective, **options)

    def objective(self, model: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        return cross_entropy(model(batch[0]), batch[1])


def test_a_trainer_that_holds_everything_is_no_reason_to_warn(tmp_path: Path) -> None:
    def build() -> Script:
        trainer = Logger()
        return Script(trainer.loop, trainer.loader, held_out())

    assert_resumed_alike(build, [10], 2)


def compiled() -> Script:
    return scripted(torch.compile(network(norm=False), backend="eager"))


def compiled_in_place() -> Script:
    model = network(norm=False)
    model.compile(backend="eager")
    return scripted(model)


def logging_objective() -> Script:
    logger = logging.getLogger("an objective")

    def objective(model: nn.Module, batch: Any) -> Tensor:
        logger.debug("called")
        return cross_entropy(model(batch[0]), batch[1])

    return scripted(objective=objective)


QUIET = [compiled, compiled_in_place, logging_objective]


@pytest.mark.parametrize("build", QUIET, ids=[build.__name__ for build in QUIET])
def test_what_libraries_keep_for_themselves_is_no_reason_to_warn(build: Callable[[], Script]) -> None:
    assert_resumed_alike(build, [5], 1)


def test_generators_that_are_made_later_are_named(tmp_path: Path) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(norm=False)
            self.generator: torch.Generator | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.generator = self.generator or torch.Generator().manual_seed(1)
            return self.inner(x + 0.1 * torch.rand(x.shape, generator=self.generator))

    made = scripted(Late())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        made.loop.fit(made.loader, save=tmp_path, progress=False)
    made = scripted(Late())
    with pytest.warns(CheckpointWarning, match=r"model\.generator"):
        made.loop.fit(made.loader, epochs=2, save=tmp_path, resume=True, progress=False)


# stateful=


@pytest.mark.parametrize(
    "wrong", [{"ema": object()}, {"ema": AveragedModel}, {"a": None}, {1: nn.Linear(1, 1)}, [1], 3]
)
def test_what_has_no_state_is_refused(wrong: Any) -> None:
    with pytest.raises(BadArgument, match="stateful") as refusal:
        scripted(stateful=wrong)
    assert refusal.value.fix


class Box:
    """Tells a state of any kind."""

    def __init__(self, value: Any, *, refuses: bool = False) -> None:
        self.value = value
        self._refuses = refuses

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._refuses and isinstance(state["value"], Tensor):
            raise KeyError("another form is wanted")
        self.value = state["value"]


def test_what_was_saved_must_be_handed_over_again(tmp_path: Path) -> None:
    first = scripted(stateful={"box": Box(torch.ones(2)), "net": nn.Linear(2, 1)})
    first.loop.fit(first.loader, save=tmp_path, progress=False)
    before = [parameter.detach().clone() for parameter in scripted().loop.model.parameters()]
    refused = {
        r"holds the state of box, net, and this loop was not given it": None,
        r"holds the state of box, and": {"net": nn.Linear(2, 1)},
        r"another net: .* float32\[1, 3\] here": {"net": nn.Linear(3, 1), "box": Box(1)},
        r"box cannot load its state .*another form is wanted": {"box": Box(1, refuses=True), "net": nn.Linear(2, 1)},
    }
    for says, stateful in refused.items():
        made = scripted(stateful=stateful)
        with pytest.raises(BadArgument, match=says):
            made.loop.fit(made.loader, epochs=2, save=tmp_path, resume=True, progress=False)
        assert made.loop.steps == 0
        assert all(torch.equal(a, b) for a, b in zip(made.loop.model.parameters(), before, strict=True))
        if stateful and "box" in stateful:
            assert stateful["box"].value == 1
    box, net = Box(0), nn.Linear(2, 1)
    made = scripted(stateful={"box": box, "net": net})
    made.loop.fit(made.loader, epochs=2, save=tmp_path, resume=True, progress=False)
    assert torch.equal(box.value, torch.ones(2))


def test_what_is_handed_over_for_the_first_time_is_named(tmp_path: Path) -> None:
    first = scripted()
    first.loop.fit(first.loader, save=tmp_path, progress=False)
    made = scripted(stateful={"box": Box(1)})
    with pytest.warns(CheckpointWarning, match="differ in: box"):
        made.loop.fit(made.loader, epochs=2, save=tmp_path, resume=True, progress=False)


def test_the_same_loop_goes_on_with_its_containers_in_a_notebook(tmp_path: Path) -> None:
    made = containers()
    at_step(made.loop, 5, signalled(signal.SIGTERM))
    options: dict[str, Any] = {"save": tmp_path, "resume": True, "progress": False, "epochs": 3}
    made.loop.fit(made.loader, **options)
    made.loop.model.losses.append(99.0)  # by hand, after the checkpoint
    made.loop.fit(made.loader, **options)
    assert 99.0 not in made.loop.model.losses
    assert len(made.loop.model.losses) == 1 + 24
