"""Workers stay from epoch to epoch where that gives what workers give which are started in every epoch, to the bit."""

import functools
import gc
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

import hotloop
from hotloop.data import Stream

from ..thorough import some, tries
from .test_position import seeded

EPOCHS = tries(2, 3)
FACTOR = 1.0  # a global that items read


class Box:
    def __init__(self, x: float) -> None:
        self.x = x


class Augmented(Dataset[Tensor]):
    """Items that are other ones each time, by all the random numbers that people use; and who made them."""

    scale = 1.0

    def __init__(self, length: int = 9) -> None:
        self.length = length
        self.offset = 0.0
        self.paths = [f"{i}.jpg" for i in range(1000)]
        self.data = np.zeros((1000, 200), np.uint8)
        self.options = {"flip": [0.0]}
        self.boxes = [Box(0.0) for _ in range(300)]
        self.masks = [torch.zeros(2) for _ in range(300)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Tensor:
        info = get_worker_info()
        noise = torch.rand(()).item() + random.random() + np.random.rand() + self.offset + self.options["flip"][0]  # noqa: S311
        told = (
            len("".join(self.paths)) + self.data.sum() + self.scale + FACTOR + (0 if info is None else info.seed % 997)
        )
        return torch.tensor([i, noise, float(told), os.getpid()], dtype=torch.float64)


def seed_worker(number: int) -> None:
    """As the page of PyTorch on reproducibility has it."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def by_hand(number: int) -> None:
    info = get_worker_info()
    info.dataset.offset += 100.0 * number + info.seed % 7


Change = Callable[[Any], object]


def run(
    build: Callable[[], Any], *, streamed: bool, change: Change | None = None, epochs: int = EPOCHS
) -> tuple[list[Any], list[set[float]]]:
    """Some epochs, what was drawn from, and the processes that made the items of each epoch."""
    torch.default_generator.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    loader = build()
    batches = Stream(loader, "cpu", "direct") if streamed else loader
    seen: list[Any] = []
    processes = []
    for _ in range(epochs):
        rows = []
        for batch in batches:
            rows.append(batch.reshape(-1, 4))
            torch.rand(2)  # as dropout does
        made = torch.cat(rows)
        seen.append(made[:, :3].tolist())
        processes.append(set(made[:, 3].tolist()))
        if change is not None:
            change(loader.dataset)
    states = [torch.get_rng_state().tolist(), random.getstate(), np.random.rand()]
    own = [] if loader.generator is None else loader.generator.get_state().tolist()
    return [seen, states, own], processes


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled by the global generator": lambda: DataLoader(Augmented(), 2, shuffle=True, num_workers=2),
    "generator": lambda: DataLoader(Augmented(), 2, shuffle=True, generator=seeded(), num_workers=1, prefetch_factor=3),
    "fewer batches than workers": lambda: DataLoader(Augmented(3), 4, shuffle=True, num_workers=2),
    "one by one": lambda: DataLoader(Augmented(5), None, shuffle=True, num_workers=1),
    "worker_init_fn": lambda: DataLoader(Augmented(), 3, shuffle=True, num_workers=1, worker_init_fn=seed_worker),
    "a part": lambda: DataLoader(Subset(Augmented(), [4, 2, 7]), 2, num_workers=1),
}


@pytest.mark.parametrize("build", LOADERS.values(), ids=LOADERS)
def test_the_same_numbers_from_the_same_processes(build: Callable[[], Any]) -> None:
    (plain, _), (ours, processes) = (run(build, streamed=streamed) for streamed in (False, True))
    assert ours == plain
    assert processes == [processes[0]] * EPOCHS


def in_the_middle(data: Augmented) -> None:
    data.paths[500] += "!"


def one_place(data: Augmented) -> None:
    data.data[501, 7] += 1


def an_object_among_many(data: Augmented) -> None:
    data.boxes[150].x += 1


def a_tensor_among_many(data: Augmented) -> None:
    data.masks[150].numpy()[1] += 1


def a_row(data: Augmented) -> None:
    data.paths = [*data.paths[::-1], "more"]


def a_transform(data: Augmented) -> None:
    data.options["flip"][0] += 1


def of_the_class(data: Augmented) -> None:
    type(data).scale += 1


def a_global(data: Augmented) -> None:
    global FACTOR  # noqa: PLW0603
    FACTOR += 1


CHANGES: dict[str, Change] = {
    "attribute": lambda data: setattr(data, "offset", data.offset + 1),
    "entry of a long list": in_the_middle,
    "byte of an array": one_place,
    "object in a long list": an_object_among_many,
    "tensor in a long list": a_tensor_among_many,
    "replaced list": a_row,
    "nested": a_transform,
    "class attribute": of_the_class,
    "global": a_global,
}


def test_a_dataset_that_changes_between_epochs_gets_new_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One change after each epoch, and none after the last but one, whose workers stay."""
    results = []
    for streamed in (False, True):
        monkeypatch.setattr(Augmented, "scale", 1.0)
        monkeypatch.setitem(globals(), "FACTOR", 1.0)
        changes = iter(CHANGES.values())
        build = partial(DataLoader, Augmented(4), 2, num_workers=1)
        change = partial(_change_once, changes)
        results.append(run(build, streamed=streamed, change=change, epochs=len(CHANGES) + 2))
    (plain, _), (ours, processes) = results
    assert ours == plain
    stayed = [
        name for name, (one, next_one) in zip([*CHANGES, "none"], pairwise(processes), strict=True) if one & next_one
    ]
    assert stayed == ["none"]


def _change_once(changes: Iterator[Change], data: Any) -> None:
    next(changes, lambda data: None)(data)


class Counting(Augmented):
    def __getitem__(self, i: int) -> Tensor:
        self.offset += 1
        return super().__getitem__(i)


class Caching(Augmented):
    def __getitem__(self, i: int) -> Tensor:
        self.paths[500 + i] = f"{i}.png of the cache"
        return super().__getitem__(i)


class InPlace(Augmented):
    def __getitem__(self, i: int) -> Tensor:
        self.data[400 + i, 3] += 1
        return super().__getitem__(i)


class WithDice(Augmented):
    def __init__(self, length: int = 9) -> None:
        super().__init__(length)
        self.rng = np.random.default_rng(4)

    def __getitem__(self, i: int) -> Tensor:
        return super().__getitem__(i) + torch.tensor([0, self.rng.random(), 0, 0])


class OpeningLate(Augmented):
    file: Any = None

    def __getitem__(self, i: int) -> Tensor:
        self.file = self.file or memoryview(b"opened")
        return super().__getitem__(i)


class Opaque(Augmented):
    def __init__(self, length: int = 9) -> None:
        super().__init__(length)
        self.table = threading.Lock()  # what is in an extension cannot be compared


@functools.cache
def noise_of(i: int) -> float:
    return torch.rand(()).item()


class CachedFunction(Augmented):
    def __getitem__(self, i: int) -> Tensor:
        return super().__getitem__(i) + torch.tensor([0, noise_of(i), 0, 0])


class CachedMethod(Augmented):
    @functools.lru_cache(maxsize=8)  # noqa: B019 - as people write it
    def noise_of(self, i: int) -> float:
        return torch.rand(()).item()

    def __getitem__(self, i: int) -> Tensor:
        return super().__getitem__(i) + torch.tensor([0, self.noise_of(i), 0, 0])


NEW = [Counting, Caching, InPlace, WithDice, OpeningLate, Opaque, CachedFunction, CachedMethod]


@pytest.mark.parametrize("kind", some(NEW, [Counting, InPlace, WithDice, Opaque, CachedMethod]))
def test_what_items_change_in_their_dataset_is_gone_in_the_next_epoch(kind: type[Augmented]) -> None:
    (plain, _), (ours, processes) = (
        run(lambda: DataLoader(kind(4), 2, shuffle=True, num_workers=1), streamed=streamed, epochs=2)
        for streamed in (False, True)
    )
    assert ours == plain
    assert len(set.union(*processes)) == 2


def test_a_worker_init_fn_runs_once_for_each_worker_and_epoch() -> None:
    (plain, _), (ours, _) = (
        run(lambda: DataLoader(Augmented(4), 2, num_workers=2, worker_init_fn=by_hand), streamed=streamed, epochs=2)
        for streamed in (False, True)
    )
    assert ours == plain


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


def gone(before: set[int]) -> bool:
    until = time.monotonic() + 5
    while children() - before and time.monotonic() < until:
        time.sleep(0.01)
    return not children() - before


def test_workers_end_with_their_stream_or_when_it_is_closed() -> None:
    before = children()
    batches = Stream(DataLoader(Augmented(), 3, num_workers=1), "cpu")
    list(batches)
    assert len(children() - before) == 1
    batches.close()
    assert gone(before)
    list(batches)
    assert len(children() - before) == 1
    del batches
    assert gone(before)


def test_an_epoch_that_is_left_early_leaves_no_workers() -> None:
    torch.manual_seed(2)
    loader = DataLoader(Augmented(), 2, shuffle=True, num_workers=1)
    plain = [next(iter(loader))[:, 1], *(batch[:, 1] for batch in loader)]
    torch.manual_seed(2)
    before = children()
    batches = Stream(DataLoader(Augmented(), 2, shuffle=True, num_workers=1), "cpu")
    ours = [next(iter(batches))[:, 1]]
    assert gone(before)
    ours += [batch[:, 1] for batch in batches]
    assert all(map(torch.equal, ours, plain))


def test_persistent_workers_of_the_person_are_theirs() -> None:
    """They go on with their rng states, as they would with the loader itself."""
    build = partial(DataLoader, Augmented(), 2, shuffle=True, num_workers=1, persistent_workers=True)
    (plain, _), (ours, processes) = (run(build, streamed=streamed) for streamed in (False, True))
    assert ours == plain
    assert processes == [processes[0]] * EPOCHS


class Noise(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(3), torch.rand(1)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_no_worker_of_an_evaluation_is_left(persistent: bool, saved: bool, tmp_path: Path) -> None:
    """They end with the run that evaluates, and not when the garbage collector comes by."""
    before, model = children(), nn.Linear(3, 1)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu", plan="plain")
    validate: DataLoader[Any] = DataLoader(Noise(), 8, num_workers=1, persistent_workers=persistent)
    for _ in range(2):
        options = {"save": tmp_path / str(loop.steps)} if saved else {}
        loop.fit(DataLoader(Noise(), 8), epochs=2, validate=validate, progress=False, monitor=False, **options)
        own = {worker.pid for worker in getattr(validate._iterator, "_workers", [])}  # of the person's loader itself
        assert children() - before - own == set()


class Processes(Noise):
    """The target of each item is the process that made it."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.rand(3), torch.tensor([float(os.getpid())])


def test_evaluations_keep_their_workers_too() -> None:
    model = nn.Linear(3, 1)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.0), nn.MSELoss(), device="cpu", plan="plain")
    validate = DataLoader(Processes(), 8, num_workers=2)
    metrics = {"process": lambda output, target: target.double()}
    report = loop.fit(DataLoader(Noise(), 8), epochs=3, validate=validate, metrics=metrics, progress=False)
    assert len({epoch.metrics["process"] for epoch in report.epochs}) == 1


class Slow(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Tensor:
        time.sleep(0.02)
        return torch.zeros(8)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_time_that_is_waited_for_a_loader(workers: int) -> None:
    batches = Stream(DataLoader(Slow(), 2, num_workers=workers), "cpu")
    assert (batches.waited, batches.batches) == (0.0, 0)
    began = time.perf_counter()
    list(batches)
    assert 0.1 < batches.waited < time.perf_counter() - began
    assert (batches.batches, batches.batch_bytes, batches.workers) == (3, 64, workers)
    waited, began = batches.waited, time.perf_counter()
    for _ in batches:
        time.sleep(0.08)
    of_the_loop = 3 * 0.08
    assert batches.waited - waited <= time.perf_counter() - began - of_the_loop


def test_data_on_the_device_is_not_waited_for() -> None:
    def rows() -> Iterator[Tensor]:
        yield from torch.ones(3)

    batches = Stream(DataLoader(torch.utils.data.TensorDataset(torch.ones(8)), 2, num_workers=2), "cpu")
    list(batches)
    assert (batches.kind, batches.waited, batches.batches, batches.workers) == ("resident", 0.0, 0, 0)
    assert "lives on the device" in (batches.why_workers_stay or "")
    batches.close()
    list(Stream(rows(), "cpu"))


def test_persistent_workers_of_a_stream_that_is_garbage_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not after the seconds for which PyTorch waits for each of them."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 30.0)
    batches = Stream(DataLoader(Augmented(), 3, num_workers=2, persistent_workers=True), "cpu")
    list(batches)
    workers = set(multiprocessing.active_children())
    holder = [batches]
    holder.append(holder)  # a cycle, as a loop and its parts are
    began = time.monotonic()
    del batches, holder
    gc.collect()
    assert time.monotonic() - began < 20
    assert len(workers - set(multiprocessing.active_children())) == 2
