"""A dataset that lives on the device: batches are gathered there, in exactly the order of the DataLoader.

A change of the data is noticed where PyTorch counts it (`tensor[3] = 0`), and at the beginning of each epoch also where
it does not (through NumPy, or `.data`): tensors and arrays of up to 512 KiB are compared as a whole, larger ones in
1,024 places that are spread over them. The indices of a `Subset` are compared for each batch. A change of the data that
touches none of these places is not noticed. Nor is one in the middle of an epoch before the next begins, one of a
tensor on a GPU that goes past its counter, or, of a dataset with `resident = True`, one in what is no tensor or array
among its attributes, or changes while items are made.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, islice
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)
from torch.utils.weak import WeakIdKeyDictionary

from hotloop._torch import is_simulated_gpu, version_of
from hotloop.data.epochs import Epochs, Position, Skip, Tell
from hotloop.data.loader_rng import LoaderRng
from hotloop.data.order import can_draw_at_once, draws_at_once
from hotloop.data.origin import BatchOrigin, is_in_order, twin
from hotloop.data.samplers import has_known_sampler, index_sampler
from hotloop.device.backend import backend_of
from hotloop.placement import move, upload
from hotloop.placement.moving import is_large, upload_beside
from hotloop.values.reach import memory_of
from hotloop.values.tree import leaves, map_tensors, tensors_in

RESIDENT_MEMORY_SHARE = 0.5  # of the memory that is free when the run begins: the rest is for activations
WHOLE = 1 << 19  # bytes of a tensor that are compared as a whole
PIECES, PIECE = 1024, 256  # of a larger one so many places of so many bytes are compared: a tenth of a millisecond
BESIDE = 1 << 29  # bytes, from which on a thread copies them: fewer take less time than the thread takes from the step
MOST_TENSORS = 64  # below a dataset: they are asked before each batch whether somebody has written to them
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)  # which PyTorch takes for a mask, or refuses
_kept: Any = WeakIdKeyDictionary()  # of datasets, each with its items by device


@dataclass(frozen=True)
class _ResidentItems:
    """All items of a dataset on a device, and the state of the dataset that they were copied from."""

    items: "Future[Any]"  # nested as a batch is, each tensor with all items; a thread may still copy them
    parts: list[Any]  # what it is made of
    writes: list[Any]  # how often each was written to
    looked: dict[str, object]  # some of its memory, by name
    indices: dict[int, Any]  # of the parts below it, by the ids of these, as they were

    def are_of(self, dataset: Any) -> bool:
        """Whether a dataset has the same parts, to which nobody has written since."""
        parts, writes = _parts(dataset)
        return writes == self.writes and len(parts) == len(self.parts) and all(map(is_, parts, self.parts))


def why_not_resident(loader: object, device: torch.device) -> str | None:
    """Why a loader's data cannot live on the device; None where it can."""
    if loader is None:
        return "batches are handed to `step` one by one"
    if not is_in_order(loader):
        return "the loader is not a plain DataLoader over a dataset with a length, in order"
    assert isinstance(loader, DataLoader)
    dataset = loader.dataset
    if loader.collate_fn not in (default_collate, default_convert):
        return "the loader has a collate_fn of its own"
    if loader.collate_fn is default_convert and _tensors_of(dataset) is None:
        return "the loader does not batch, so the dataset makes the batches itself"
    if not len(dataset):  # type: ignore[arg-type]
        return "the dataset is empty"
    if not is_constant(dataset):
        return "the dataset may give another item each time; set dataset.resident = True if it does not"
    if _tensors_of(dataset) is None and not all_tensors(default_collate([dataset[0]])):
        return "its items hold more than tensors and numbers"
    tensors = _tensors_of(dataset) or ()
    if any(tensor.layout != torch.strided for tensor in tensors):
        return "its tensors are sparse"
    if len(tensors) > MOST_TENSORS:
        return f"it is made of {len(tensors)} tensors, and more than {MOST_TENSORS} are not looked after"
    if len(_forms(dataset)) > 1:
        return "the datasets that it joins have items of several shapes or types"
    if not _fits(dataset, device):
        return f"it does not fit into {RESIDENT_MEMORY_SHARE:.0%} of the free memory of {device}"
    return None


class Resident(Epochs[Any]):
    """The batches of a DataLoader, gathered on the device from tensors that stay there."""

    def __init__(self, loader: DataLoader[Any], device: torch.device) -> None:
        super().__init__(LoaderRng(loader))
        self._loader = loader
        self._device, self._backend = device, backend_of(device)
        self.workers = loader.num_workers
        self.prefetched = asked_in_advance(loader)
        # The loader's own machinery over its own sampler and generator; only the fetching is left out.
        self._indices = twin(
            loader,
            dataset=_Indices(len(loader.dataset)),  # type: ignore[arg-type]
            collate_fn=_as_is,
            num_workers=0,
            prefetch_factor=None,
            persistent_workers=False,
            pin_memory=False,
            worker_init_fn=None,
            timeout=0,
        )
        self._begun = False

    def __iter__(self) -> Iterator[tuple[BatchOrigin, Any]]:
        for number, drawn in enumerate(self.draws(), self.first):
            yield self.origin(number, drawn), self.batch(drawn)

    def batch(self, drawn: Any) -> Any:
        """The batch of the items that the sampler drew, on the device.

        The first of a run may come from the host: in its step, libraries load for half a second, and meanwhile a thread
        copies all items to the device.
        """
        dataset = self._loader.dataset
        if self._device not in _kept.get(dataset, {}) and (items := _copied_beside(dataset, self._device)) is not None:
            return move(self._gathered(items, drawn if isinstance(drawn, int | slice) else _rows(drawn)), self._device)
        items = self.items()
        if type(dataset) is TensorDataset or self.holds(drawn):
            return self.gather(items, drawn)
        return move(self._read(drawn), self._device)

    def holds(self, *drawn: Any) -> bool:
        """Whether the items on the device are those that the sampler drew.

        They are not where the indices of a `Subset` were changed since: in an epoch, the loader sees that.
        """
        kept = _kept.get(self._loader.dataset, {}).get(self._device)
        before = {} if kept is None else kept.indices
        if not before or self.workers:  # which have their own copy of the indices
            return True
        positions = [*chain.from_iterable(map(self._positions, drawn))]
        return _sources(self._loader.dataset, positions, {}) == _sources(self._loader.dataset, positions, before)

    def _positions(self, drawn: Any) -> Iterable[int]:
        if isinstance(drawn, int):
            return [drawn]
        if isinstance(drawn, slice):
            return range(len(self._loader.dataset))[drawn]  # type: ignore[arg-type]
        return drawn if type(drawn) is list and type(drawn[0]) is int else _rows(drawn).reshape(-1).tolist()

    def _read(self, drawn: Any) -> Any:
        """A batch as the loader reads it."""
        dataset = self._loader.dataset
        if self._loader.batch_sampler is None:
            return self._loader.collate_fn(dataset[drawn])
        several = getattr(dataset, "__getitems__", lambda drawn: [dataset[i] for i in drawn])
        return self._loader.collate_fn(several(list(self._positions(drawn))))

    def items(self) -> Any:
        """All items on the device, nested as a batch is; copied there once, and again when someone has changed them."""
        dataset, device = self._loader.dataset, self._device
        kept = _kept.setdefault(dataset, {})
        if device not in kept or not kept[device].are_of(dataset):
            kept[device] = _copied(dataset, device)
        try:
            return kept[device].items.result()
        except BaseException:  # a thread ran out of memory
            kept.pop(device, None)
            raise

    def gather(self, items: Any, drawn: Any) -> Any:
        """The batch of the items that the sampler drew; indices are copied to the device without a wait."""
        index = drawn if isinstance(drawn, int | slice) else _rows(drawn)
        if self._backend.non_blocking and isinstance(index, Tensor):
            index = index.pin_memory().to(self._device, non_blocking=True)
        return self._gathered(items, index)

    def _gathered(self, items: Any, index: Any) -> Any:
        if self._loader.batch_sampler is None:
            is_view = isinstance(index, int | slice) and not self._backend.is_host  # on it the loader's is one, too
            return map_tensors(items, lambda whole: whole[index].clone() if is_view else whole[index])
        if type(items) is list and {*map(type, items)} == {Tensor}:  # most datasets; the walk costs more
            return [_as_stacked(whole[index]) for whole in items]
        return map_tensors(items, lambda whole: _as_stacked(whole[index]))

    @property
    def full_batches(self) -> int:
        """Batches of an epoch that are as large as the first; where that cannot be known, all but one."""
        batches = self._loader.batch_sampler
        if type(batches) is BatchSampler and isinstance(batches.sampler, Sized):
            return len(batches.sampler) // batches.batch_size
        return len(self._loader) - 1

    def origin(self, number: int, drawn: Any) -> BatchOrigin:
        return BatchOrigin(number, drawn, self._loader.dataset)

    def draws(self) -> Iterator[Any]:
        """What the sampler draws in the next epoch, with the rng state used as the DataLoader would use it."""
        return self.begin()

    def _open(self) -> Iterator[Any]:
        _forget_if_changed(self._loader.dataset, self._device)
        draws = self._drawn()
        self._begun = True
        return _in_advance(draws, self.prefetched) if self.prefetched else draws

    def _open_at(self, position: Position, skip: Skip, tell: Tell | None) -> tuple[Iterator[Any], int]:
        draws = self._open()
        skip(draws)
        return draws, 0

    def _drawn(self) -> Iterator[Any]:
        persists = self._has_begun()  # its workers are seeded once
        if can_draw_at_once(self._loader):
            return draws_at_once(self._loader, seeds_workers=not persists)
        sampler = index_sampler(self._loader)
        if persists:
            return iter(sampler)
        draws = iter(self._indices)  # draws a seed for workers, from the state that this loader draws it from
        # With workers, a DataLoader begins its sampler twice. The samplers of PyTorch draw nothing before they are
        # asked, so they may be asked directly: the loader costs more.
        return iter(sampler) if self.workers or has_known_sampler(self._loader) else draws

    def _has_begun(self) -> bool:
        return self._begun and self._loader.persistent_workers

    def _restart(self, position: Position) -> None:
        self._begun = position.begun


def asked_in_advance(loader: object) -> int:
    """Batches that the workers of a loader are asked for before the first is needed."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return 0
    return loader.num_workers * (loader.prefetch_factor or 0)


def _in_advance(draws: Iterator[Any], count: int) -> Iterator[Any]:
    """The same draws, drawn as a loader draws them for its workers: so many at once, and one more for each batch."""
    return _one_by_one(deque(islice(draws, count)), draws)


def _one_by_one(drawn: deque[Any], draws: Iterator[Any]) -> Iterator[Any]:
    while drawn:
        drawn.extend(islice(draws, 1))
        yield drawn.popleft()


class _Indices:
    """A dataset whose items are their own indices."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return index

    def __getitems__(self, indices: Any) -> Any:
        return indices


def _as_is(drawn: Any) -> Any:
    return drawn


def is_constant(dataset: Any) -> bool:
    """Whether a dataset gives the same tensors for the same index, always."""
    if type(dataset) is Subset and is_constant(dataset.dataset):
        return True
    return _tensors_of(dataset) is not None or getattr(dataset, "resident", False) is True


def _below(dataset: Any) -> list[Any]:
    """A dataset and those that it takes its items from, each before those below it."""
    if type(dataset) is Subset:
        return [dataset, *_below(dataset.dataset)]
    if type(dataset) is ConcatDataset:
        return [dataset, *(each for part in dataset.datasets for each in _below(part))]
    return [dataset]


def _sources_of(dataset: Any) -> list[Any]:
    """The datasets that items come from, below all subsets and joins."""
    return [each for each in _below(dataset) if type(each) not in (Subset, ConcatDataset)]


def _tensors_of(dataset: Any) -> tuple[Tensor, ...] | None:
    """The tensors below a TensorDataset, a subset of one, or several that are joined; None for any other dataset."""
    sources = _sources_of(dataset)
    is_of_tensors = all(type(each) is TensorDataset for each in sources)
    return tuple(tensor for each in sources for tensor in each.tensors) if is_of_tensors else None


def _forms(dataset: Any) -> set[object]:
    """What items of tensors look like: one form, or several where datasets are joined."""
    return {tuple((t.shape[1:], t.dtype, t.device) for t in _tensors_of(s) or ()) for s in _sources_of(dataset)}


def all_tensors(batch: Any) -> bool:
    """Whether a batch is made of tensors alone, in dicts, lists and tuples."""
    return all(isinstance(leaf, Tensor) for leaf in leaves(batch))


def _all_items(dataset: Any) -> Any:
    """Every item of a dataset in one batch, on the host; of a TensorDataset that is what it holds."""
    if type(dataset) is TensorDataset:
        return list(dataset.tensors)
    if type(dataset) is Subset and _tensors_of(dataset) is not None:
        index = _rows(dataset.indices)
        return [tensor[index] for tensor in _all_items(dataset.dataset)]
    if type(dataset) is ConcatDataset and _tensors_of(dataset) is not None:
        return [torch.cat(tensors) for tensors in zip(*map(_all_items, dataset.datasets), strict=True)]
    return default_collate([dataset[i] for i in range(len(dataset))])


def _rows(drawn: Any) -> Tensor:
    """Indices in whatever form they come, as a tensor that picks the rows which they pick one by one."""
    if isinstance(drawn, Iterable) and not isinstance(drawn, Sequence | Tensor | np.ndarray):
        drawn = list(drawn)  # a set, or a generator
    if isinstance(drawn, list | tuple) and drawn and isinstance(drawn[0], Tensor):
        return torch.stack(list(drawn))  # one of a single number, too, gives its item a dimension
    index = torch.as_tensor(drawn)
    return index.long() if index.dtype in _UNSIGNED or not index.numel() else index


def _as_stacked(rows: Tensor) -> Tensor:
    """Rows with the strides that they have when they are stacked, however the data lies in memory."""
    rows = rows.contiguous()
    return rows.view(rows.shape) if 1 in rows.shape else rows  # a dimension of one is contiguous with any stride


def _parts(dataset: Any) -> tuple[list[Any], list[Any]]:
    """The tensors and indices that a dataset is made of, and what changes when someone writes to them.

    Asked before each batch, so that indices are not compared one by one: `_looked` does that before each epoch.
    """
    parts: list[Any] = []
    for each in _below(dataset):
        if type(each) is ConcatDataset:
            parts += each.datasets
        elif type(each) is Subset:
            parts.append(each.indices)
        elif type(each) is TensorDataset:
            parts += each.tensors
    return parts, [writes(part) if isinstance(part, Tensor) else len(part) for part in parts]


def writes(tensor: Tensor) -> object:
    """How often a tensor was written; an inference tensor does not count, so it always seems to have changed."""
    version = version_of(tensor)
    return object() if version is None else version


def _copied(dataset: Any, device: torch.device) -> _ResidentItems:
    source = _parts(dataset)
    with torch.inference_mode(False):  # an evaluation may be the first to ask, and training the next
        before = _looked(dataset)
        items: Future[Any] = Future()
        items.set_result(upload(_all_items(dataset), device))
        after = _looked(dataset)  # what differs is no data: a counter, a cache that was filled
    looked = {name: some for name, some in before.items() if after.get(name) == some}
    return _ResidentItems(items, *source, looked, _indices_below(dataset))


def _copied_beside(dataset: Any, device: torch.device) -> Any:
    """Have a thread copy all items to a GPU; returns them on the host. None where they are not large."""
    if not backend_of(device).non_blocking or type(dataset) is not TensorDataset:
        return None
    tensors = list(dataset.tensors)
    large = sum(tensor.nbytes for tensor in tensors if is_large(tensor))
    if large < BESIDE or is_simulated_gpu() or not all(tensor.is_cpu for tensor in tensors):
        return None
    source, looked = _parts(dataset), _looked(dataset)
    _kept.setdefault(dataset, {})[device] = _ResidentItems(upload_beside(tensors, device), *source, looked, {})
    return tensors


def _forget_if_changed(dataset: Any, device: torch.device) -> None:
    """Have the items copied again where someone has written to their memory past PyTorch's counter."""
    kept = _kept.get(dataset, {})
    if device not in kept:
        return
    looked, now = kept[device].looked, _looked(dataset)
    if any(now.get(name) != some for name, some in looked.items()):
        del kept[device]


def _looked(dataset: Any) -> dict[str, object]:
    """All or some of the bytes of what a dataset holds on the host, tensors and arrays, and the indices of a part."""
    looked: dict[str, object] = {}
    for number, each in enumerate(_below(dataset)):
        if type(each) is Subset:
            looked[f"{number}.indices"] = _comparable(each.indices)
        elif type(each) is not ConcatDataset:
            held = dict(enumerate(each.tensors)) if type(each) is TensorDataset else getattr(each, "__dict__", {})
            looked |= {
                f"{number}.{name}": some for name, value in held.items() if (some := some_bytes(value)) is not None
            }
    return looked


def _indices_below(dataset: Any) -> dict[int, Any]:
    """Copies of the indices of parts, by the ids of these, where they can be changed in place."""
    parts = [each for each in _below(dataset) if type(each) is Subset]
    held = {id(part): part.indices for part in parts}
    return {
        part: own.tolist() if isinstance(own, Tensor | np.ndarray) else _comparable(own) for part, own in held.items()
    }


def _sources(dataset: Any, positions: Sequence[int], indices: dict[int, Any]) -> Sequence[Any]:
    """Where the items at these positions come from, below parts that have other `indices`, or their own."""
    if type(dataset) is ConcatDataset:
        parts = [(bisect_right(dataset.cumulative_sizes, each), each) for each in positions]
        starts = [0, *dataset.cumulative_sizes]
        return [(n, *_sources(dataset.datasets[n], [each - starts[n]], indices)) for n, each in parts]
    if type(dataset) is not Subset:
        return positions
    own: Any = dataset.indices
    if id(dataset) in indices or not isinstance(own, Tensor | np.ndarray):
        picked = [*map(indices.get(id(dataset), own).__getitem__, positions)]
    else:
        picked = own[list(positions)].tolist()
    return _sources(dataset.dataset, picked, indices)


def _comparable(indices: Any) -> object:
    """The indices of a part as they are now, in a form that can be compared."""
    if isinstance(indices, Tensor | np.ndarray):
        return np.asarray(indices.cpu() if isinstance(indices, Tensor) else indices).tobytes()
    return indices if isinstance(indices, range | tuple) else list(indices)


def some_bytes(value: object) -> bytes | None:
    """All or some of the bytes of a tensor or an array on the host; None of anything else."""
    memory = memory_of(value, WHOLE)
    if memory is None:
        return None
    if memory.size <= WHOLE:
        return memory.tobytes()  # type: ignore[no-any-return]
    gap = (memory.size - PIECE) // (PIECES - 1)
    return np.lib.stride_tricks.as_strided(memory, (PIECES, PIECE), (gap, 1), writeable=False).tobytes()


def _fits(dataset: Any, device: torch.device) -> bool:
    """Whether the items fit into the memory that the run leaves free; those that are there already cost nothing."""
    if device in _kept.get(dataset, {}) or (room := backend_of(device).room()) is None:
        return True
    needed = len(dataset) * sum(tensor.nbytes for _, tensor in tensors_in(dataset[0]) if tensor.device != device)
    return needed <= RESIDENT_MEMORY_SHARE * room
