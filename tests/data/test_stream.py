"""`Stream`: the loader's own batches, on the device, with their origin."""

import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from hotloop import Loop, stream
from hotloop.data import length_of
from hotloop.errors import BadArgument, EmptyLoader
from hotloop.plan import Plan

from ..thorough import tries
from .test_position import seeded, values

DATA = TensorDataset(torch.arange(23.0))


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(7.0)


class Own(Dataset[list[torch.Tensor]]):
    """Items that are made when asked for."""

    def __len__(self) -> int:
        return 17

    def __getitem__(self, i: int) -> list[torch.Tensor]:
        return [torch.tensor([float(i)]), torch.tensor(i)]


class Marked(Own):
    resident = True  # the same item for the same index, always


class Named(Marked):
    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": torch.tensor(float(i)), "pair": (torch.tensor(i), torch.tensor([i, i]))}


JOINED = ConcatDataset([Subset(DATA, range(9, 3, -1)), ConcatDataset([DATA]), Subset(DATA, [])])


class AsItGoes(Sampler[int]):
    """Draws each index from the global generator when it is asked for it, which workers do in advance."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(23, ())) for _ in range(12))


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(DATA, 5),
    "shuffled": lambda: DataLoader(DATA, 5, shuffle=True, generator=seeded()),
    "shuffled by the global generator": lambda: DataLoader(DATA, 4, shuffle=True),
    "without the tail": lambda: DataLoader(DATA, 5, shuffle=True, generator=seeded(), drop_last=True),
    "own sampler": lambda: DataLoader(DATA, 3, sampler=WeightedRandomSampler([1.0] * 23, 11, generator=seeded())),
    "own batch sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=seeded()), 6, drop_last=False)
    ),
    "one by one": lambda: DataLoader(DATA, batch_size=None, shuffle=True, generator=seeded()),
    "two workers": lambda: DataLoader(DATA, 4, shuffle=True, generator=seeded(), num_workers=2),
    "workers that stay": lambda: DataLoader(
        DATA, 4, shuffle=True, generator=seeded(), num_workers=1, persistent_workers=True
    ),
    "draws as it goes, with a worker": lambda: DataLoader(DATA, 2, sampler=AsItGoes(), num_workers=1),
    "a part": lambda: DataLoader(Subset(DATA, list(range(20, 2, -1))), 4, shuffle=True, generator=seeded()),
    "joined": lambda: DataLoader(JOINED, 4, shuffle=True, generator=seeded(), drop_last=True),
    "a part of what is joined": lambda: DataLoader(Subset(JOINED, [-1, 2, 0, 25, 24, 6]), 4, shuffle=True),
    "joined, one by one": lambda: DataLoader(JOINED, batch_size=None, shuffle=True, num_workers=1),
    "own items": lambda: DataLoader(Own(), 4, shuffle=True, generator=seeded()),
    "own items, marked": lambda: DataLoader(Marked(), 4, shuffle=True, generator=seeded()),
    "iterable": lambda: DataLoader(Endless(), 3),
}


def epochs_of(batches: Any) -> tuple[list[list[Any]], torch.Tensor]:
    """Some epochs and the rng state after them; a draw between batches, as dropout would make it."""
    seen = []
    for _ in range(tries(2, 3)):
        seen.append([])
        for batch in batches:
            seen[-1].append((type(batch), values(batch), torch.rand(1).item() if isinstance(batch, list) else 0))
    return seen, torch.get_rng_state()


@pytest.mark.parametrize("kind", ["auto", "direct"])
@pytest.mark.parametrize("build", LOADERS.values(), ids=LOADERS)
def test_exactly_the_batches_that_the_loader_would_have_given(build: Any, kind: Any) -> None:
    torch.manual_seed(11)
    plain, state = epochs_of(build())
    torch.manual_seed(11)
    streamed, state_after = epochs_of(stream(build(), "cpu", kind))
    assert streamed == plain
    assert torch.equal(state, state_after), "the rng state is used as the loader uses it"


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "iterable"])
def test_the_origin_names_the_samples_of_each_batch(name: str) -> None:
    streamed = stream(LOADERS[name](), "cpu")
    for _ in range(2):
        for number, batch in enumerate(streamed):
            assert streamed.origin.number == number
            expected = [streamed.origin.dataset[i] for i in streamed.origin.indices or ()]
            assert [float(torch.as_tensor(item[0])) for item in expected] == values(batch)


def test_the_loader_that_was_given_stays_as_it_was() -> None:
    loader = LOADERS["shuffled"]()
    before = dict(loader.__dict__)
    list(stream(loader, "cpu"))
    assert loader.__dict__ == before


KINDS = {
    "in order": "resident",
    "two workers": "resident",
    "a part": "resident",
    "own items, marked": "resident",
    "own items": "direct",
    "iterable": "direct",
}


@pytest.mark.parametrize(("name", "kind"), KINDS.items(), ids=KINDS)
def test_only_what_is_always_the_same_lives_on_the_device(name: str, kind: str) -> None:
    assert stream(LOADERS[name](), "cpu").kind == kind


def test_a_loader_with_a_collate_of_its_own_is_left_to_it() -> None:
    streamed = stream(DataLoader(DATA, 4, collate_fn=len), "cpu")
    assert streamed.kind == "direct"
    assert "collate_fn" in streamed.reason
    assert list(streamed) == [4, 4, 4, 4, 4, 3]


def test_asking_for_what_cannot_be_says_why() -> None:
    with pytest.raises(BadArgument, match=r"set dataset\.resident = True"):
        stream(LOADERS["own items"](), "cpu", "resident")
    with pytest.raises(BadArgument, match="direct, prefetched, resident"):
        stream([], "cpu", "sideways")


def test_a_cpu_copies_nothing_ahead() -> None:
    streamed = stream(LOADERS["own items"](), "cpu", "prefetched")
    assert (streamed.kind, streamed.reason) == ("direct", "a cpu device cannot prefetch")
    assert len(list(streamed)) == 5


def test_nested_items_stay_nested() -> None:
    loader = DataLoader(Named(), 4)
    for ours, plain in zip(stream(loader, "cpu"), loader, strict=True):
        assert type(ours["pair"]) is type(plain["pair"])
        assert torch.equal(ours["x"], plain["x"])
        assert all(torch.equal(a, b) for a, b in zip(ours["pair"], plain["pair"], strict=True))


CHANGES = {
    "written": lambda data: data.tensors[0].add_(1),
    "replaced": lambda data: setattr(data, "tensors", (torch.ones(4),)),
    "written through NumPy": lambda data: data.tensors[0].numpy().fill(1),
    "written past the counter": lambda data: data.tensors[0].data.add_(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda d: d,
        lambda d: Subset(d, [1, 2]),
        lambda d: Subset(Subset(d, [3, 0]), [1]),
        lambda d: ConcatDataset([Subset(d, [3]), d]),
    ],
)
def test_whatever_was_changed_is_seen_in_the_next_epoch(change: Any, wrap: Any) -> None:
    data = TensorDataset(torch.zeros(4))
    streamed = stream(DataLoader(wrap(data), 4), "cpu")
    assert streamed.kind == "resident"
    assert set(values(next(iter(streamed)))) == {0}
    change(data)
    assert set(values(next(iter(streamed)))) == {1}


class Held(Dataset[Any]):
    """A dataset that is marked as constant, and holds its items in an array or a tensor."""

    resident = True
    __hash__ = None  # as of a dataclass, which is compared by its values

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.as_tensor(self.values[i])


def part_of(values: torch.Tensor) -> Dataset[Any]:
    return Subset(TensorDataset(values), range(len(values)))


LAYOUTS: dict[str, Any] = {
    "small": lambda: torch.zeros(3000, 2),
    "large": lambda: torch.zeros(1000, 700),
    "bfloat16": lambda: torch.zeros(1000, 700, dtype=torch.bfloat16),
    "transposed": lambda: torch.zeros(700, 1000).T,
    "every other": lambda: torch.zeros(2000, 700)[::2],
    "expanded": lambda: torch.zeros(700).expand(1000, 700),
    "bool": lambda: torch.zeros(2000, 700, dtype=torch.bool),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hold", [part_of, Held], ids=["a part of tensors", "own"])
def test_data_written_in_place_past_pytorch_is_seen_in_the_next_epoch(layout: str, hold: Any) -> None:
    values = LAYOUTS[layout]()
    streamed = stream(DataLoader(hold(values), 500), "cpu")
    assert streamed.kind == "resident"

    def total() -> float:
        return sum(float((batch[0] if isinstance(batch, list) else batch).double().sum()) for batch in streamed)

    assert total() == 0
    (values[0] if layout == "expanded" else values).data.fill_(1)
    assert total() == values.numel()


def test_arrays_written_in_place_are_seen_in_the_next_epoch() -> None:
    for array in (np.zeros((3000, 2)), np.zeros((1000, 700), order="F"), np.zeros((2000, 700))[::2]):
        streamed = stream(DataLoader(Held(array), 500), "cpu", "resident")
        assert sum(float(batch.sum()) for batch in streamed) == 0
        array[:] = 1
        assert sum(float(batch.sum()) for batch in streamed) == array.size


def test_one_row_of_a_thousand_is_seen_wherever_it_is() -> None:
    values = torch.zeros(1000, 700)
    streamed = stream(DataLoader(part_of(values), 1000), "cpu")
    for row in range(0, 1000, 111):
        values.numpy()[row] = 1
        (batch,) = next(iter(streamed))
        assert torch.equal(batch, values)


NOT_ONE: dict[str, Any] = {
    "of several shapes or types": lambda: ConcatDataset(
        [TensorDataset(torch.ones(4, 2)), TensorDataset(torch.ones(4, 3))]
    ),
    "shapes or types": lambda: ConcatDataset([TensorDataset(torch.ones(4)), TensorDataset(torch.ones(4).long())]),
    "another item": lambda: ConcatDataset([DATA, Own()]),
    "more than 64": lambda: ConcatDataset([TensorDataset(torch.ones(4)) for _ in range(65)]),
}


@pytest.mark.parametrize("words", NOT_ONE)
def test_datasets_that_are_joined_and_are_no_one_tensor_are_read_by_the_loader(words: str) -> None:
    loader = DataLoader(NOT_ONE[words](), 4)
    streamed = stream(loader, "cpu")
    assert streamed.kind != "resident"
    assert values(next(iter(streamed))) == values(next(iter(loader)))
    with pytest.raises(BadArgument, match=words):
        stream(loader, "cpu", "resident")


# Data, how other items get into it, and the items before and after.
OTHERS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], list[float], list[float]]] = {
    "joined": (
        lambda: ConcatDataset([Subset(DATA, [1]), Subset(DATA, [2])]),
        lambda data: data.datasets.__setitem__(1, Subset(DATA, [5])),
        [1, 2],
        [1, 5],
    ),
    "chosen anew": (lambda: Subset(DATA, [1, 2]), lambda data: setattr(data, "indices", [5, 6]), [1, 2], [5, 6]),
    **{
        f"changed in place, {form.__name__}": (
            partial(lambda form: Subset(Subset(DATA, range(2, 10)), form([1, 2])), form),
            lambda data: data.indices.__setitem__(1, 6),
            [3, 4],
            [3, 8],
        )
        for form in (list, np.array, torch.tensor)
    },
}


@pytest.mark.parametrize(("build", "change", "before", "after"), OTHERS.values(), ids=OTHERS)
def test_other_items_are_seen_in_the_next_epoch(
    build: Callable[[], Any], change: Callable[[Any], object], before: list[float], after: list[float]
) -> None:
    data = build()
    streamed = stream(DataLoader(data, 4), "cpu")
    assert values(next(iter(streamed))) == before
    change(data)
    assert values(next(iter(streamed))) == after


def _parts(form: Callable[[Any], Any]) -> dict[str, tuple[Any, Callable[[], object]]]:
    """Parts of data, and how to change which items each has."""
    chosen = form(range(12))
    part, whole = Subset(DATA, chosen), TensorDataset(torch.arange(-12.0, 0))

    def change() -> None:
        for number in range(12):
            chosen[number] = 20 - number

    return {
        "a part": (part, change),
        "a part of a part": (Subset(part, form(range(11, -1, -1))), change),
        "joined": (ConcatDataset([whole, part]), change),
        "one at a time": (part, lambda: chosen.__setitem__(7, 19)),
    }


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("form", [list, np.array, torch.tensor], ids=["list", "array", "tensor"])
@pytest.mark.parametrize("kind", ["a part", "a part of a part", "joined", "one at a time"])
def test_a_part_that_changes_within_an_epoch_gives_what_its_loader_gives(
    kind: str, form: Callable[[Any], Any], shuffle: bool
) -> None:
    found = []
    for ours in (False, True):
        dataset, change = _parts(lambda chosen: form(list(chosen)))[kind]
        loader = DataLoader(dataset, 2, shuffle=shuffle, generator=seeded())
        batches: list[Any] = []
        for number, batch in enumerate(stream(loader, "cpu", "resident") if ours else loader):
            batches.append(values(batch))
            if number == 1:
                change()
        found.append(batches)
    assert found[0] == found[1]


def test_a_hook_that_changes_a_part_within_an_epoch_trains_as_a_loop_by_hand() -> None:
    weights = []
    for ours in (False, True):
        torch.manual_seed(0)
        model, chosen = nn.Linear(1, 1), list(range(64))
        x = torch.linspace(-1, 1, 128).view(128, 1)
        loader = DataLoader(Subset(TensorDataset(x, x.sin()), chosen), 4, shuffle=True)
        optimizer, criterion = torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss()

        def harder(step: int, chosen: list[int] = chosen) -> None:
            chosen[:] = [(each + step) % 128 for each in chosen]

        if ours:
            loop = Loop(model, optimizer, criterion, device="cpu")
            loop.fit(loader, epochs=2, on_step=lambda record: harder(record.step), progress=False)
        by_hand = itertools.chain.from_iterable(loader for _ in range(0 if ours else 2))
        for number, (inputs, targets) in enumerate(by_hand, 1):
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()
            harder(number)
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


class Iterated(list[int]):
    """Indices that count how often somebody goes through all of them."""

    times = 0

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return super().__iter__()

    def __eq__(self, other: object) -> bool:
        self.times += 1
        return super().__eq__(other)

    __hash__ = None


def test_nobody_goes_through_the_indices_of_a_part_in_each_step() -> None:
    """As `random_split` makes them: there may be a million."""
    rows = torch.arange(1000.0).view(1000, 1)
    part = Subset(TensorDataset(rows, rows), Iterated(range(0, 1000, 2)))
    model = nn.Linear(1, 1)
    plan = Plan("cpu", stream="resident")
    loop = Loop(model, torch.optim.SGD(model.parameters(), 1e-9), nn.MSELoss(), device="cpu", plan=plan)
    loop.fit(DataLoader(part, 1, shuffle=True), epochs=2, progress=False)
    assert isinstance(part.indices, Iterated)
    assert part.indices.times < 20, "of 1,000 steps"


def test_tensors_made_in_inference_mode() -> None:
    with torch.inference_mode():
        data = TensorDataset(torch.zeros(4))
    streamed = stream(DataLoader(Subset(data, [0, 1]), 2), "cpu")
    assert values(next(iter(streamed))) == [0, 0]
    with torch.inference_mode():
        data.tensors[0].add_(1)
    assert values(next(iter(streamed))) == [1, 1], "such tensors do not count their writes, so they are read again"


def test_an_evaluation_first_and_then_a_training() -> None:
    streamed = stream(DataLoader(Subset(TensorDataset(torch.ones(4, 2)), [2, 1]), batch_size=None), "cpu")
    with torch.inference_mode():
        list(streamed)
    (batch,) = next(iter(streamed))
    assert not batch.is_inference()
    weight = torch.ones(2, requires_grad=True)
    (weight * batch).sum().backward()
    assert weight.grad is not None


class Labelled(Marked):
    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": torch.tensor(float(i)), "name": str(i)}


def test_items_with_words_are_not_kept_even_if_marked() -> None:
    loader = DataLoader(Labelled(), 2)
    streamed = stream(loader, "cpu")
    assert "more than tensors" in streamed.reason
    assert [batch["name"] for batch in streamed] == [batch["name"] for batch in loader]


DRAWS: dict[str, list[Any]] = {
    "slices": [slice(0, 2), slice(2, 7, 3)],
    "arrays": [np.array([0, 2]), np.array([5])],
    "lists": [[0, 2], [5]],
    "tensors": [torch.tensor([3, 1])],
    "numbers": [4, np.int64(2)],
}
FORMS: dict[str, Any] = {
    "sets": set,
    "generators": iter,
    "dicts": dict.fromkeys,
    "short integers": lambda drawn: np.array(drawn, np.uint16),
    "bytes of NumPy": lambda drawn: [np.uint8(i) for i in drawn],
    "tensors of one number": lambda drawn: [torch.tensor([i]) for i in drawn],
}


class Drawing:
    def __init__(self, form: Any) -> None:
        self.form = form

    def __iter__(self) -> Iterator[Any]:
        return (self.form([i, i + 2, 22]) for i in range(4))


DRAWN: dict[str, DataLoader[Any]] = {
    **{name: DataLoader(DATA, batch_size=None, sampler=draws) for name, draws in DRAWS.items()},
    **{f"batches: {name}": DataLoader(DATA, batch_sampler=Drawing(form)) for name, form in FORMS.items()},
    **{
        f"a part by {dtype.__name__}": DataLoader(Subset(DATA, np.arange(3, 20, dtype=dtype)), 4)
        for dtype in (np.uint8, np.uint16)
    },
}


@pytest.mark.parametrize("loader", DRAWN.values(), ids=DRAWN)
def test_whatever_a_sampler_draws(loader: DataLoader[Any]) -> None:
    streamed = stream(loader, "cpu")
    assert streamed.kind == "resident"
    assert [values(batch) for batch in streamed] == [values(batch) for batch in loader]


@pytest.mark.parametrize("shape", [(9, 4, 5, 3), (9, 4, 5, 1), (9, 1, 4, 3)], ids=str)
def test_batches_lie_in_memory_as_those_of_the_loader_do(shape: tuple[int, ...]) -> None:
    pictures = torch.randn(shape).permute(0, 3, 1, 2)  # channels were last, as in files
    loader = DataLoader(TensorDataset(pictures), 4)
    streamed = stream(loader, "cpu")
    assert streamed.kind == "resident"
    for (ours,), (theirs,) in zip(streamed, loader, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


def test_sparse_tensors_are_left_to_the_loader() -> None:
    loader = DataLoader(TensorDataset(torch.eye(6).reshape(6, 3, 2).to_sparse(1)), 4)  # its items are dense
    streamed = stream(loader, "cpu")
    assert (streamed.kind, streamed.reason) == ("direct", "its tensors are sparse")
    assert [values(batch) for batch in streamed] == [values(batch) for batch in loader]


class Keyed(Own):
    def __getitem__(self, key: Any) -> list[torch.Tensor]:
        if key == "b":
            raise OSError("gone")
        return [torch.tensor([float("nan")]), torch.tensor(0)]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_within_an_epoch(workers: int) -> None:
    streamed = stream(DataLoader(Own(), 5, num_workers=workers), "cpu")
    inner = [[values(b) for b in streamed] for _ in streamed]
    assert inner == [[values(b) for b in streamed]] * 4


def test_an_origin_never_fails() -> None:
    streamed = stream(DataLoader(Keyed(), 1, sampler=["a"]), "cpu")
    list(streamed)
    assert streamed.origin.indices is None
    assert streamed.origin.broken_samples() == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["direct", "prefetched", "resident"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_batches_on_cuda(kind: Any, workers: int) -> None:
    gc.collect()  # else the workers of the plain loader may: see hotloop.data.loader_workers
    data = TensorDataset(torch.randn(5000, 64), torch.arange(5000))
    plain = DataLoader(data, 64, shuffle=True, generator=seeded(), num_workers=workers)
    ours = stream(DataLoader(data, 64, shuffle=True, generator=seeded(), num_workers=workers), "cuda", kind)
    assert ours.kind == kind
    for _ in range(2):
        for batch, expected in zip(ours, plain, strict=True):
            torch.cuda._sleep(200_000)  # the device lags behind the host, so that a buffer used too early would show
            assert batch[0].is_cuda
            assert torch.equal((batch[0] * 1).cpu(), expected[0])
            assert torch.equal(batch[1].cpu(), expected[1])


LARGE = 1200  # rows of 64 KiB


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a thread copy data of that size beside the first step."""
    monkeypatch.setattr("hotloop.data.on_device.BESIDE", 1)


@pytest.mark.gpu
@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("shuffle", [False, True])
def test_large_data_is_copied_beside_the_first_step(shuffle: bool) -> None:
    data = TensorDataset(torch.randn(LARGE, 1 << 14), torch.arange(LARGE))
    ours = stream(DataLoader(data, 64, shuffle=shuffle, generator=seeded()), "cuda", "resident")
    plain = DataLoader(data, 64, shuffle=shuffle, generator=seeded())
    for _ in range(2):
        for batch, expected in zip(ours, plain, strict=True):
            torch.cuda._sleep(200_000)
            assert torch.equal(batch[0].cpu(), expected[0])
            assert torch.equal(batch[1].cpu(), expected[1])
    assert torch.equal(ours.resident.items()[0].cpu(), data.tensors[0])


@pytest.mark.gpu
@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("counted", [True, False], ids=["by PyTorch", "through NumPy"])
def test_data_that_the_first_step_changes_is_copied_again(counted: bool) -> None:
    data = TensorDataset(torch.zeros(LARGE, 1 << 14))
    ours = stream(DataLoader(data, 64), "cuda", "resident")
    for _ in ours:
        break
    if counted:
        data.tensors[0].fill_(1)
    else:
        data.tensors[0].numpy().fill(1)
    assert all(bool((batch == 1).all()) for (batch,) in ours)


@pytest.mark.gpu
@pytest.mark.usefixtures("beside")
def test_a_copy_that_fails_beside_the_first_step_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(items: Any, device: torch.device) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    data = TensorDataset(torch.randn(LARGE, 1 << 14))
    ours = stream(DataLoader(data, 64), "cuda", "resident")
    monkeypatch.setattr("hotloop.placement.moving.upload", fails)
    with pytest.raises(torch.OutOfMemoryError):
        list(ours)
    monkeypatch.undo()
    assert all(
        torch.equal(batch.cpu(), expected) for (batch,), (expected,) in zip(ours, DataLoader(data, 64), strict=True)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["prefetched", "resident"])
def test_batches_come_without_a_wait(kind: Any, no_waits: Any) -> None:
    data = TensorDataset(torch.randn(1024, 8), torch.arange(1024))
    streamed = stream(DataLoader(data, 64), "cuda", kind)
    list(streamed)
    with no_waits():
        count = sum(1 for _ in streamed)
    assert count == 16


@pytest.mark.gpu
def test_data_that_does_not_fit_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotloop.data import on_device

    monkeypatch.setattr(on_device, "RESIDENT_MEMORY_SHARE", 0.0)
    streamed = stream(DataLoader(TensorDataset(torch.ones(4, 2)), 2), "cuda")
    assert streamed.kind == "direct"
    assert "does not fit" in streamed.reason


EMPTY: dict[str, tuple[Any, str]] = {
    "list": (list, "list is empty"),
    "generator": (lambda: iter(()), "used up"),
    "dataset": (lambda: DataLoader(TensorDataset(torch.zeros(0))), "its dataset is empty"),
    "drop_last": (lambda: DataLoader(DATA, 50, drop_last=True), "fewer than batch_size=50"),
    "sampler": (lambda: DataLoader(DATA, sampler=[]), "sampler drew nothing"),
}


@pytest.mark.parametrize(("build", "says"), EMPTY.values(), ids=EMPTY)
def test_an_empty_loader_says_why(build: Any, says: str) -> None:
    with pytest.raises(EmptyLoader, match=says):
        list(stream(build(), "cpu"))


def test_length() -> None:
    assert length_of(DataLoader(DATA, 5)) == 5
    assert length_of(iter([])) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert length_of(DataLoader(Endless())) is None


class Breaking(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(3.0)
        raise LookupError("the disk is gone")


@pytest.mark.gpu
def test_batches_before_an_error_of_the_loader_come_although_it_reads_ahead() -> None:
    batches = iter(stream(DataLoader(Breaking(), batch_size=None), "cuda", "prefetched"))
    assert [next(batches).item() for _ in range(3)] == [0.0, 1.0, 2.0]
    with pytest.raises(LookupError, match="the disk"):
        next(batches)


@pytest.mark.parametrize("plan", ["auto", "plain"])
@pytest.mark.parametrize("data", [DATA, Own()], ids=["constant", "made anew"])
def test_a_loader_that_is_given_other_attributes_is_seen_in_the_next_epoch(data: Any, plan: Any) -> None:
    def train(batches: Any, loader: DataLoader[Any]) -> list[Any]:
        torch.manual_seed(0)
        seen: list[Any] = []
        for epoch in range(3):
            seen += [values(batch) for batch in batches(loader)]
            seen.append(torch.get_rng_state().tolist())
            loader.collate_fn = lambda items, epoch=epoch: [items[0][0] + epoch]
            loader.generator = torch.Generator().manual_seed(epoch)
        return seen

    model = torch.nn.Linear(1, 1)
    loop = Loop(model, torch.optim.SGD(model.parameters()), torch.nn.MSELoss(), device="cpu", plan=plan)
    theirs = train(iter, DataLoader(data, 4, shuffle=True))
    assert train(loop.batches, DataLoader(data, 4, shuffle=True)) == theirs
