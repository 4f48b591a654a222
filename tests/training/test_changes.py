"""State in unusual places: saved, so that a resumed run is the same to the bit, or named in a warning."""

import logging
import random
import signal
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate

from hotloop import Loop, stream
from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.errors import BadArgument

from ..thorough import THOROUGH, tries
from .test_state import BATCH, ITEMS, Script, broken, held_out, interrupt_at, network, points, same, shuffled, unbroken

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


class Generators(nn.Module):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(norm=False)
        self.generators = [torch.Generator().manual_seed(4)]
        self.numpy = np.random.default_rng(4)
        self.old = np.random.RandomState(4)
        self.python = random.Random(4)  # noqa: S311

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0.1 * torch.rand(x.shape, generator=self.generators[0])
            x = x + 0.1 * self.python.random() + 0.1 * float(self.numpy.random()) + 0.1 * self.old.rand()
        return self.inner(x)


def generators_in_a_module() -> Script:
    return scripted(Generators())


def generator_in_a_closure() -> Script:
    generator = torch.Generator().manual_seed(3)

    def objective(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0] + 0.1 * torch.rand(batch[0].shape, generator=generator)), batch[1])

    return scripted(objective=objective)


class Noise:
    """A transform with a generator and a count."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(2)
        self.calls = 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        return batch[0] + 0.01 * self.calls + 0.1 * float(self.generator.random()), batch[1]


def transform_with_state() -> Script:
    return scripted(device_transform=Noise())


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


class Warming:
    """An objective that is an object, with state in plain attributes."""

    def __init__(self) -> None:
        self.seen = 0
        self.history: list[float] = []

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen += 1
        loss = cross_entropy(model(batch[0]), batch[1])
        self.history.append(loss.item())
        return loss * min(1.0, self.seen / 20) * (1 + 0.1 * self.history[0])

    def method(self, model: nn.Module, batch: Any) -> Tensor:
        return self(model, batch)


def objective_with_state() -> Script:
    return scripted(objective=Warming())


def method_of_an_object_with_state() -> Script:
    return scripted(objective=Warming().method)


class Telling(Warming):
    """The same in slots of its own, which it tells."""

    def __init__(self) -> None:
        super().__init__()
        self.box = {"inner": object()}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "history": torch.tensor(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.history = state["seen"], state["history"].tolist()


def objective_that_tells_its_state() -> Script:
    return scripted(objective=Telling())


class Rising(torch.optim.SGD):
    """An optimizer that keeps something of its own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.updates = 0
        self.norms: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.updates += 1
        self.norms.append(self.updates / 10)
        for group in self.param_groups:
            group["lr"] = 0.05 / (1 + 0.1 * self.updates + self.norms[-1])
        return super().step(closure)


def optimizer_with_attributes() -> Script:
    model = network(norm=False)
    return scripted(model, optimizer=Rising(model.parameters(), 0.05))


class Curriculum(Sampler[int]):
    """A sampler that counts its epochs and remembers an order, in attributes of other names."""

    def __init__(self) -> None:
        self.rounds = 0
        self.order = list(range(ITEMS))
        self.rng = random.Random(5)  # noqa: S311

    def __len__(self) -> int:
        return ITEMS

    def __iter__(self) -> Iterator[int]:
        self.rounds += 1
        self.rng.shuffle(self.order)
        return iter(self.order[self.rounds :] + self.order[: self.rounds])


def sampler_with_state() -> Script:
    return scripted(loader=DataLoader(TensorDataset(*points()), BATCH, sampler=Curriculum()))


class OwnLoader:
    """A loader of the person's own that keeps an order."""

    def __init__(self) -> None:
        self.shift = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        self.shift += 3
        inputs, targets = points()
        for start in range(5):
            index = (torch.arange(BATCH) + self.shift + BATCH * start) % ITEMS
            yield inputs[index], targets[index]


def loader_with_state() -> Script:
    return scripted(loader=OwnLoader())


class Counting(Dataset[Any]):
    """A dataset whose items depend on how many were made before."""

    def __init__(self) -> None:
        self.inputs, self.targets = points()
        self.made = 0

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Any:
        self.made += 1
        return self.inputs[index] + 0.001 * self.made, self.targets[index]


def dataset_with_state() -> Script:
    return scripted(loader=shuffled(dataset=Counting()))


class Collating:
    """A collate_fn with a generator and a count."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)
        self.calls = 0

    def __call__(self, items: Any) -> Any:
        self.calls += 1
        inputs, targets = default_collate(items)
        return inputs + 0.1 * float(self.rng.random()) + 0.001 * self.calls, targets


def collate_with_state() -> Script:
    return scripted(loader=shuffled(collate_fn=Collating()))


@dataclass
class Settings:
    """What many models keep beside their layers."""

    temperature: float = 1.0
    phases: list[int] = field(default_factory=list)


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network(norm=False)
        self.config = Settings()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.config.temperature *= 0.99
            self.config.phases.append(len(self.config.phases))
        return self.inner(x) * self.config.temperature + 0.001 * len(self.config.phases)


def settings_that_change() -> Script:
    return scripted(Configured())


def averaged() -> Script:
    """A mean of the weights that is updated after each step, and pulls at them."""
    model = network(norm=False)
    ema = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    optimizer.register_step_post_hook(lambda *_: ema.update_parameters(model))

    def objective(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            taught = ema(batch[0])
        return cross_entropy(model(batch[0]), batch[1]) + nn.functional.mse_loss(model(batch[0]), taught)

    return scripted(model, optimizer=optimizer, objective=objective, stateful={"ema": ema})


SAVED: list[Callable[[], Script]] = [
    containers,
    generators_in_a_module,
    generator_in_a_closure,
    transform_with_state,
    transform_that_is_a_module,
    objective_with_state,
    method_of_an_object_with_state,
    objective_that_tells_its_state,
    optimizer_with_attributes,
    sampler_with_state,
    loader_with_state,
    dataset_with_state,
    collate_with_state,
    settings_that_change,
    averaged,
]


def assert_resumed_alike(build: Callable[[], Script], stops: list[int], epochs: int) -> None:
    """A run that is stopped after so many steps of each of its lives ends as one that was not, to the bit."""
    stopped = broken(build, stops, epochs)
    assert stopped.lives > 1
    same(unbroken(build, epochs), stopped)


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


def test_containers_that_training_does_not_change_are_settings(tmp_path: Path) -> None:
    class Set(nn.Module):
        def __init__(self, sizes: list[int]) -> None:
            super().__init__()
            self.inner, self.sizes = network(norm=False), sizes

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    first = scripted(Set([1, 2]))
    first.loop.fit(first.loader, save=tmp_path, progress=False)
    made = scripted(Set([3]))
    made.loop.fit(made.loader, epochs=2, save=tmp_path, resume=True, progress=False)
    assert made.loop.model.sizes == [3]


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


def persistent_training() -> Script:
    return scripted(loader=shuffled(dataset=Drawing(), num_workers=2, persistent_workers=True))


class Blurring:
    """A collate_fn that draws from a generator of its own, and keeps nothing else."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __call__(self, items: Any) -> Any:
        inputs, targets = default_collate(items)
        return inputs + 0.1 * float(self.rng.random()), targets


def persistent_collating() -> Script:
    options = {"num_workers": 1, "persistent_workers": True, "collate_fn": Blurring()}
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


def validated_by_workers() -> Script:
    return persistent_validation(own=False)


def validated_by_workers_with_a_generator() -> Script:
    return persistent_validation(own=True)


def validated_by_workers_on_constant_items() -> Script:
    return persistent_validation(own=False, dataset=lambda: TensorDataset(*points()))


PERSISTENT = [
    persistent_training,
    persistent_collating,
    validated_by_workers,
    validated_by_workers_with_a_generator,
    validated_by_workers_on_constant_items,
]


@pytest.mark.parametrize("build", PERSISTENT, ids=[build.__name__ for build in PERSISTENT])
def test_workers_that_persist_go_on_with_their_generators(build: Callable[[], Script]) -> None:
    epochs, stops = tries(2, 3), [3, 11] if THOROUGH else [11]
    assert_resumed_alike(build, stops, epochs)


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


def counter_in_a_closure() -> Script:
    calls = [0]

    def objective(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        return cross_entropy(model(batch[0]), batch[1]) * (1 + 0.1 * calls[0])

    return scripted(objective=objective)


def average_in_a_hook() -> Script:
    model = network(norm=False)
    ema = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    optimizer.register_step_post_hook(lambda *_: ema.update_parameters(model))
    return scripted(model, optimizer=optimizer)


class Memory:
    """A class of the person's own that holds more than plain values."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.more = object()


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network(norm=False)
        self.memory = Memory()
        self.pairs: list[Any] = [object()]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.memory.rows.append(x.mean().item())
            self.pairs.append(object())
        return self.inner(x) * (1 + 0.01 * len(self.memory.rows))


def object_in_a_module() -> Script:
    return scripted(Remembering())


def count_in_persistent_workers() -> Script:
    return scripted(loader=shuffled(dataset=Counting(), num_workers=1, persistent_workers=True))


def count_in_persistent_workers_of_the_evaluation() -> Script:
    made = scripted()
    validate = DataLoader(Counting(), BATCH, num_workers=1, persistent_workers=True)
    return replace(made, more={"validate": validate})


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
    counter_in_a_closure: "calls",
    average_in_a_hook: "ema",
    object_in_a_module: r"model\.memory\.rows, model\.pairs",
    count_in_persistent_workers: r"dataset\.made",
    count_in_persistent_workers_of_the_evaluation: r"validation dataset\.made",
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


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_training(tmp_path: Path) -> None:
    made = scripted(stateful={"box": Box(object())})
    with pytest.raises(BadArgument, match=r"given\.box\.value"):
        made.loop.fit(made.loader, save=tmp_path, progress=False)
    assert made.loop.steps == 0


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
    interrupt_at(made.loop, 5, signal.SIGTERM)
    options: dict[str, Any] = {"save": tmp_path, "resume": True, "progress": False, "epochs": 3}
    made.loop.fit(made.loader, **options)
    made.loop.model.losses.append(99.0)  # by hand, after the checkpoint
    made.loop.fit(made.loader, **options)
    assert 99.0 not in made.loop.model.losses
    assert len(made.loop.model.losses) == 1 + 24


def test_streams_tell_what_persistent_workers_changed() -> None:
    loader = DataLoader(Counting(), BATCH, num_workers=1, persistent_workers=True)
    streamed = stream(loader, "cpu")
    list(streamed)
    assert streamed.changed_in_workers == ["dataset.made"]
