"""A checkpoint from elsewhere: whatever it says, the run goes on from it or it is refused and nothing has changed."""

import json
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.checkpoint.codec import pack
from hotloop.checkpoint.damage import DamagedCheckpoint
from hotloop.checkpoint.reader import load
from hotloop.checkpoint.store import Store
from hotloop.checkpoint.tensorfile import HostSource
from hotloop.errors import BadArgument, BatchError, LossNotFinite

from ..thorough import tries

pytestmark = pytest.mark.filterwarnings("ignore::hotloop.checkpoint.damage.CheckpointWarning")
EPOCHS = 2
DATA = TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2)


class Net(nn.Module):
    """Keeps settings, and what training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 2))
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.url = "https://mine"  # a setting
        self.phase = "early"
        self.calls = 0
        self.temperature: float | Tensor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean.lerp_(x.mean(0), 0.1)
            self.temperature = self.temperature * torch.tensor(0.99)
            self.phase = "late"
        return torch.as_tensor(self.inner(x)) / self.temperature


class Script(NamedTuple):
    model: Net
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loop: hotloop.Loop

    def fit(self, folder: Path, **options: Any) -> hotloop.Report:
        loader = DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(3))
        held_out = DataLoader(DATA, 6)
        options = {"epochs": EPOCHS, "every": "1h", "monitor": False, "progress": False, **options}
        return self.loop.fit(loader, validate=held_out, save=folder, **options)

    def values(self) -> str:
        """Everything that a checkpoint may change, in words."""
        model, optimizer = self.model, self.optimizer
        return repr(
            [
                {name: value.tolist() for name, value in model.state_dict().items()},
                {name: str(value) for name, value in vars(model).items() if not name.startswith("_")},
                [(module.training, sorted(vars(module))) for module in model.modules()],
                (model.mean.tolist(), [parameter.requires_grad for parameter in model.parameters()]),
                ([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups], len(optimizer.state)),
                sorted((name, str(value)) for name, value in vars(self.scheduler).items()),
                (self.loop.steps, self.loop.epoch, self.loop.plan),
                (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
            ]
        )


def build() -> Script:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = OneCycleLR(optimizer, 0.05, total_steps=20)
    loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", scheduler=scheduler)
    return Script(model, optimizer, scheduler, loop)


class Saved(NamedTuple):
    """A checkpoint, taken apart: its JSON can be changed, and its sums are right again when it is written."""

    step: int
    tensors: dict[str, Tensor]
    state: Any

    def write(self, folder: Path, state: Any) -> None:
        Store(folder).write(self.step, [HostSource(self.tensors)], state)

    @property
    def copy(self) -> Any:
        return json.loads(json.dumps(self.state))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """Checkpoints within an epoch and after one."""
    return {name: _saved(tmp_path_factory.mktemp(name), step) for name, step in {"within": 4, "after": 3}.items()}


def _saved(folder: Path, steps: int) -> Saved:
    made = build()

    def stop(*_: object) -> None:
        if made.model.calls == steps:
            signal.raise_signal(signal.SIGINT)

    made.model.register_forward_hook(stop)
    assert made.fit(folder).saved == steps
    got = load(folder / f"step-{steps:09d}")
    return Saved(got.step, *pack(got.tree))


def paths(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    inner = node.items() if isinstance(node, dict) else enumerate(node[:3]) if isinstance(node, list) else ()
    for key, value in inner:
        yield from paths(value, (*at, key))


GONE = object()
VALUES = [GONE, None, True, -1, 10**12, 1.5, "x", [], [1, 2], {}, {"a": 1}, {"$tuple": []}, {"$tensor": ""}]


def put(state: Any, at: tuple[Any, ...], value: Any) -> Any:
    """A state with one value changed."""
    if not at:
        return None if value is GONE else value
    node = state
    for key in at[:-1]:
        node = node[key]
    if value is GONE:
        del node[at[-1]]
    else:
        node[at[-1]] = value
    return state


@pytest.mark.parametrize("when", ["within", "after"])
def test_any_change_of_it_is_harmless(saved: dict[str, Saved], when: str, tmp_path: Path) -> None:
    given = saved[when]
    every = [(at, value) for at in paths(given.state) for value in VALUES]
    for number, (at, value) in enumerate(random.Random(when).sample(every, tries(15, 60))):  # noqa: S311
        if value == {"$tensor": ""}:
            value = {"$tensor": min(given.tensors)}  # noqa: PLW2901
        made = build()
        before = made.values()
        given.write(tmp_path / str(number), put(given.copy, at, value))
        try:
            made.fit(tmp_path / str(number), resume=True)
        except (LossNotFinite, BatchError):
            pass  # it went on, with values that can be and make no sense
        except (BadArgument, DamagedCheckpoint):
            assert made.values() == before, (at, value)
        assert made.model.url == "https://mine", (at, value)


ATTRIBUTES: dict[str, tuple[tuple[Any, ...], Any, bool]] = {
    "what training changes": ((0, "", "phase"), "other", True),
    "a number": ((0, "inner.2", "p"), 0.5, True),
    "a setting in words": ((0, "", "url"), "https://theirs", False),
    "a setting in a list of words": ((0, "", "url"), ["https://theirs"], False),
    "a method": ((0, "", "forward"), "theirs", False),
    "something new": ((0, "", "theirs"), "theirs", False),
    "what PyTorch keeps": ((0, "", "_forward_hooks"), {"a": 1}, False),
    "another kind of value": ((0, "", "calls"), "theirs", False),
    "an attribute of nothing": ((0, "nowhere", "a"), 1, False),
}


@pytest.mark.parametrize(("key", "value", "is_taken"), ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_it_sets_only_what_training_changes(
    saved: dict[str, Saved], tmp_path: Path, key: tuple[Any, ...], value: Any, is_taken: bool
) -> None:
    state = saved["after"].copy
    _, packed = pack({key: value})
    entries = state["python_state"]["attributes"]["$dict"]
    state["python_state"]["attributes"]["$dict"] = [each for each in entries if each[0] != packed["$dict"][0][0]]
    state["python_state"]["attributes"]["$dict"] += packed["$dict"]
    saved["after"].write(tmp_path, state)
    made = build()
    made.fit(tmp_path, epochs=1, resume=True)  # nothing is left to train
    _, path, name = key
    owner = dict(made.model.named_modules()).get(path)
    assert (owner is not None and vars(owner).get(name) == value) == is_taken


def test_it_does_not_say_how_many_processes_load(saved: dict[str, Saved], tmp_path: Path) -> None:
    state = saved["after"].copy
    state["loop"]["plan"] |= {"workers": 100_000, "micro_batch": 1, "graph": 9, "tf32": True}
    saved["after"].write(tmp_path, state)
    made = build()
    made.fit(tmp_path, resume=True)
    assert (made.loop.plan.workers, made.loop.plan.micro_batch) == (None, None)
    assert (made.loop.plan.graph, made.loop.plan.tf32) == (0, False)


def test_tensors_that_are_named_again_and_again(saved: dict[str, Saved], tmp_path: Path) -> None:
    state = saved["after"].copy
    large = "large"
    tensors = {**saved["after"].tensors, large: torch.zeros(1 << 16, dtype=torch.uint8)}
    kept = state["loop"]["optimizers"][0]["state"]["$dict"][0][1]
    kept |= {f"more {n}": {"$tensor": large} for n in range(100)}
    Saved(saved["after"].step, tensors, state).write(tmp_path, state)
    with pytest.raises(DamagedCheckpoint, match="AdamW"):
        build().fit(tmp_path, resume=True)


ARRAYS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "one in many places": (4, lambda array: [array] * 1000),
    "of nothing, without end": (0, lambda array: {**array, "dtype": "|S0", "shape": [10**12]}),
}


@pytest.mark.parametrize(("length", "change"), ARRAYS.values(), ids=ARRAYS)
def test_arrays_take_no_more_memory_than_the_file_has(
    tmp_path: Path, length: int, change: Callable[[Any], Any]
) -> None:
    tensors, state = pack(np.zeros(length))
    Store(tmp_path).write(1, [HostSource(tensors)], change(state))
    with pytest.raises(DamagedCheckpoint, match="damaged"):
        load(tmp_path / "step-000000001")
