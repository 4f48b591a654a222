"""A tree of plain data and tensors, taken apart into tensors and JSON and put together again; never pickle.

JSON holds what it can hold as itself. Everything else is an object whose first key is a tag that begins with `$`.
"""

import base64
import math
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotloop._torch import METADATA, metadata_of, set_metadata, storage_id
from hotloop.checkpoint.tensorfile import DTYPE_NAMES
from hotloop.errors import BadArgument
from hotloop.printing.text import printable
from hotloop.values.kinds import ARRAYS, DICTS, KEYS, SEQUENCES, SETS, is_plain_number

DEEPEST = 100  # levels; a tree that contains itself has no end
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_SMALL = 2**63  # what every reader of JSON takes as an integer


def _bits(*numbers: float) -> str:
    return struct.pack(f">{len(numbers)}d", *numbers).hex()


def _numbers(held: str) -> tuple[float, ...]:
    bits = bytes.fromhex(held)
    return struct.unpack(f">{len(bits) // 8}d", bits)


def _string(held: Any) -> str:
    if not isinstance(held, str):
        raise ValueError("a string was expected")
    return held


_WORDS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {  # tag, to JSON, from JSON
    int: ("$int", hex, lambda held: int(held, 16)),
    float: ("$float", _bits, lambda held: _numbers(held)[0]),
    complex: ("$complex", lambda number: _bits(number.real, number.imag), lambda held: complex(*_numbers(held))),
    str: (
        "$str",
        lambda text: text.encode("utf-8", "surrogatepass").hex(),
        lambda held: bytes.fromhex(held).decode("utf-8", "surrogatepass"),
    ),
    bytes: (
        "$bytes",
        lambda value: base64.b64encode(value).decode(),
        lambda held: base64.b64decode(held, validate=True),
    ),
    torch.dtype: ("$dtype", str, _DTYPES.__getitem__),
    torch.device: ("$device", str, lambda held: torch.device(_string(held))),
}
_WORDS_BY_TAG = {tag: read for tag, _, read in _WORDS.values()}
_ITEMS: dict[type, str] = {tuple: "$tuple", torch.Size: "$size", set: "$set", frozenset: "$frozenset"}
_ITEMS_BY_TAG: dict[str, Callable[[list[Any]], Any]] = {tag: kind for kind, tag in _ITEMS.items()}


def pack(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a tree under readable names, and everything else as data for JSON.

    The tensors are those of the tree, not copies. Tensors that are the same memory are given once.

    >>> pack({"weight": torch.zeros(2), "step": 7, "betas": (0.9, 0.999)})
    ({'weight': tensor([0., 0.])}, {'weight': {'$tensor': 'weight'}, 'step': 7, 'betas': {'$tuple': [0.9, 0.999]}})
    """
    packed = Packed(tree)
    return packed.tensors, packed.data


def unpack(tensors: dict[str, Tensor], data: Any, shards: Mapping[str, Tensor] | None = None) -> Any:
    """The tree that `pack` took apart; data of any other kind is a ValueError.

    Tensors are on the CPU and without gradients, each in the memory order that it had. `shards` are those that were put
    together.
    """
    try:
        return _Unpacking(tensors, shards or {}).value(data)
    except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, MemoryError, struct.error) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


class TreeToJson:
    """One walk through a tree, which gives data for JSON and keeps tensors and arrays aside."""

    def __init__(self) -> None:
        self.place: list[Any] = []  # keys from the root to where we are

    def value(self, value: Any) -> Any:
        kind = type(value)
        if _is_in_json(value):
            return value
        if kind in _WORDS:
            tag, packed, _ = _WORDS[kind]
            return {tag: packed(value)}
        if kind in SEQUENCES or kind is torch.Size:
            return self._sequence(value)
        if kind in SETS:
            return {_ITEMS[kind]: [self._key(item) for item in sorted(value, key=_word)]}
        if kind in DICTS:
            return self._dict(value)
        if isinstance(value, Tensor):
            return self.tensor(value)
        if is_plain_number(value):
            return {"$scalar": value.dtype.str, "bytes": value.tobytes()[: value.dtype.itemsize].hex()}
        if kind is np.ndarray and value.dtype.kind in ARRAYS:
            return self.array(value)
        if kind is bytearray:
            return {"$bytearray": self.store(_bytes(value))}
        raise self.error(f"a {kind.__module__}.{kind.__qualname__}")

    def tensor(self, tensor: Tensor) -> Any:
        """Data that stand for a tensor."""
        raise NotImplementedError

    def array(self, value: Any) -> Any:
        """Data that stand for an array."""
        return {"$array": self.store(_bytes(value.tobytes())), "dtype": value.dtype.str, "shape": list(value.shape)}

    def store(self, tensor: Tensor) -> Any:
        """Keep a tensor; returns what names it."""
        raise NotImplementedError

    def items(self, items: Any) -> list[Any]:
        if _are_in_json(items):  # a hundred times as fast, for long lists of numbers or words
            return list(items)
        return [self._inside(number, item) for number, item in enumerate(items)]

    def mapping(self, given: dict[Any, Any]) -> Any:
        if all(type(key) is str and not key.startswith("$") and _is_text(key) for key in given):
            return {key: self._inside(key, item) for key, item in given.items()}
        return {"$dict": [[self._key(key), self._inside(key, item)] for key, item in given.items()]}

    def error(self, what: str) -> Exception:
        """Why something cannot be taken apart."""
        place = self.where()[:200] or "the whole"
        return BadArgument(
            f"a checkpoint cannot hold {place}: it is {printable(what)}",
            fix="checkpoints hold tensors, arrays, numbers, strings, lists, tuples, sets and dicts; leave the rest out",
        )

    def where(self) -> str:
        """Where in the tree: `schedulers[0].milestones`."""
        keys = (f".{key}" if isinstance(key, str) else f"[{_word(key)}]" for key in self.place)
        path = "".join(keys).removeprefix(".")
        return path if path.isprintable() else printable(path)  # which takes longer than all the rest

    def _inside(self, key: Any, value: Any) -> Any:
        self.place.append(key)
        if len(self.place) > DEEPEST:
            raise self.error(f"more than {DEEPEST} levels (does it contain itself?)")
        packed = self.value(value)
        self.place.pop()
        return packed

    def _sequence(self, given: Any) -> Any:
        items = self.items(given)
        if type(given) is deque:
            return {"$deque": items, "maxlen": given.maxlen}
        return items if type(given) is list else {_ITEMS[type(given)]: items}

    def _dict(self, given: dict[Any, Any]) -> Any:
        if type(given) is Counter:
            return {"$counter": self.mapping(given)}
        if type(given) is not OrderedDict:
            return self.mapping(given)
        packed = {"$ordered": self.mapping(given)}  # a module's state dict, with the versions of its layers
        if (metadata := metadata_of(given)) is not None:
            packed["metadata"] = self._inside(METADATA, metadata)
        return packed

    def _key(self, key: Any) -> Any:
        """A key of a dict or an item of a set: plain, or a tuple of such."""
        if type(key) is tuple:
            return {"$tuple": [self._key(item) for item in key]}
        if type(key) not in KEYS:
            raise self.error(f"a key of type {type(key).__module__}.{type(key).__qualname__}")
        return self.value(key)


class Packed(TreeToJson):
    """A tree that was taken apart, with tensors named by their places.

    With `takes_shards`, `DTensor`s are shards, whose rows lie over several ranks; nothing is gathered.
    """

    def __init__(self, tree: Any, *, takes_shards: bool = False) -> None:
        super().__init__()
        self.tensors: dict[str, Tensor] = {}  # those that are whole
        self.shards: dict[str, Tensor] = {}  # this rank's rows, where it has some
        self.starts: dict[str, int] = {}  # at which row of the whole tensor these begin
        self._takes_shards = takes_shards
        self._names: set[str] = set()
        self._known: dict[Any, str] = {}  # memory → the name it is stored under
        self.data = self.value(tree)

    def tensor(self, tensor: Tensor) -> Any:
        data = tensor.detach()
        if self._takes_shards and hasattr(data, "device_mesh"):
            return self._shard(data)
        if type(data) is not Tensor or data.layout != torch.strided or data.is_quantized or data.is_meta:
            kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
            raise self.error(f"a {kind} of {data.dtype} and {data.layout} on {data.device}")
        storage = storage_id(data.untyped_storage())
        memory = (storage, data.storage_offset(), data.shape, data.stride(), data.dtype, data.is_conj())
        about: dict[str, Any] = {}
        if data.dtype not in DTYPE_NAMES:
            about = {"dtype": str(data.dtype), "shape": list(data.shape)}
        elif not data.is_contiguous() and (order := _order(data)) is not None:
            about = {"order": order}
        if memory not in self._known:
            plain = data.resolve_conj().resolve_neg()
            self._known[memory] = self.store(_raw(plain) if data.dtype not in DTYPE_NAMES else plain)
        return {"$tensor": self._known[memory], **about}

    def _shard(self, tensor: Any) -> Any:
        """The rows of this rank. All ranks give a tensor the same name: its place, whether they have rows or not."""
        from hotloop.checkpoint.shards import ShardEntry  # noqa: PLC0415  # of ranks alone

        entry = ShardEntry.of_sharded(tensor)
        if entry is None:
            raise self.error(f"a tensor of {tensor.dtype} with the placements {tensor.placements}")
        rows = tensor.to_local()
        memory = (storage_id(rows.untyped_storage()), rows.storage_offset(), tensor.shape, tensor.dtype)
        if len(rows) == 0 or memory not in self._known:
            self._known[memory] = name = self._name()
            if len(rows):
                self.shards[name] = rows
                self.starts[name] = entry.rows(tensor.device_mesh.get_local_rank())[0]
        return {"$shard": self._known[memory], **entry.to_json()}

    def store(self, tensor: Tensor) -> str:
        name = self._name()
        self.tensors[name] = tensor
        return name

    def _name(self) -> str:
        """One that says where it is; whatever else a rank holds, all ranks find the same."""
        name = place = self.where()[:200]
        number = 1
        while name in self._names or name in ("__metadata__", ""):  # the first is the format's own
            name, number = f"{place}#{number}", number + 1
        self._names.add(name)
        return name


class JsonToTree:
    """One walk back, through data from a file, which may be anything."""

    def value(self, data: Any) -> Any:
        if isinstance(data, list):
            return [self.value(item) for item in data]
        if not isinstance(data, dict):
            return data
        tag = next(iter(data), "")
        if not tag.startswith("$"):
            return {key: self.value(item) for key, item in data.items()}
        return self.tagged(tag, data[tag], data)

    def tagged(self, tag: str, held: Any, data: dict[str, Any]) -> Any:
        """What data with a tag stand for."""
        if tag in _WORDS_BY_TAG:
            return _WORDS_BY_TAG[tag](held)
        if tag in _ITEMS_BY_TAG:
            return _ITEMS_BY_TAG[tag](self._list(held))
        match tag:
            case "$deque":
                return deque(self._list(held), data["maxlen"])
            case "$dict":
                return {self.value(key): self.value(item) for key, item in held}
            case "$counter":
                return Counter(self._mapping(held))
            case "$ordered":
                made = OrderedDict(self._mapping(held))
                if "metadata" in data:
                    set_metadata(made, self._mapping(data["metadata"]))
                return made
            case "$array":
                return _array(data["dtype"], data["shape"], self.stored(held))
            case "$bytearray":
                return bytearray(self.stored(held).tobytes())
            case "$scalar":
                return _array(held, [], bytes.fromhex(data["bytes"]))[()]
        raise ValueError(f"unknown tag {tag!r}")

    def stored(self, name: Any) -> Any:
        """The bytes that were stored, as an array."""
        raise NotImplementedError

    def _list(self, held: Any) -> list[Any]:
        if not isinstance(held, list):
            raise ValueError("a list was expected")
        return [self.value(item) for item in held]

    def _mapping(self, held: Any) -> dict[Any, Any]:
        made = self.value(held)
        if not isinstance(made, dict):
            raise ValueError("an object was expected")
        return made


class _Unpacking(JsonToTree):
    """Takes tensors by their names."""

    def __init__(self, tensors: dict[str, Tensor], shards: Mapping[str, Tensor]) -> None:
        self._tensors, self._shards = tensors, shards
        self._made: dict[str, Tensor] = {}
        self._arrays: set[str] = set()  # names that were taken, each of them once: every array is a copy

    def tagged(self, tag: str, held: Any, data: dict[str, Any]) -> Any:
        if tag == "$tensor":
            return self._tensor(held, data)
        return self._shards[_string(held)] if tag == "$shard" else super().tagged(tag, held, data)

    def stored(self, name: Any) -> Any:
        if name in self._arrays:
            raise ValueError("two arrays in one place")
        self._arrays.add(name)
        return self._tensors[name].numpy()

    def _tensor(self, name: str, data: dict[str, Any]) -> Tensor:
        """The same name gives the same tensor, so that what was tied is tied."""
        if name not in self._made:
            stored = self._tensors[name]
            if "dtype" in data:
                stored = stored.view(_DTYPES[data["dtype"]]).reshape(data["shape"])
            if "order" in data:
                order = data["order"]
                stored = stored.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
            self._made[name] = stored
        return self._made[name]


def _array(kind: Any, shape: Any, content: Any) -> Any:
    dtype = np.dtype(_string(kind))
    if dtype.kind not in ARRAYS:  # objects, records
        raise ValueError(f"arrays of {kind!r} are not stored")
    if (shape and not dtype.itemsize) or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError("an array of another size was expected")
    return np.ndarray(tuple(shape), dtype, content).copy() if len(content) else np.zeros(tuple(shape), dtype)


def _order(tensor: Tensor) -> list[int] | None:
    """The dimensions from the outermost in memory, such as channels last; None where memory has holes."""
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    return order if tensor.permute(order).is_contiguous() else None


def _bytes(value: bytes | bytearray) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(value), np.uint8))


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor whose type the file format does not know."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _is_in_json(value: Any) -> bool:
    """Whether JSON holds a value as it is, without a tag."""
    kind = type(value)
    if kind is int or kind is float:
        return bool(-_SMALL <= value < _SMALL)
    return value is None or kind is bool or (kind is str and _is_text(value))


def _are_in_json(values: Any) -> bool:
    """The same of all of these, which are of kinds that most lists have."""
    kinds = set(map(type, values))
    if kinds <= {int, float, bool}:
        return all(-_SMALL <= each < _SMALL for each in values)
    return kinds == {str} and all(map(_is_text, values))


def _is_text(value: str) -> bool:
    """Whether a string is Unicode that every reader of JSON gives back; halves of surrogate pairs are not."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)


def _word(key: Any) -> str:
    try:
        return repr(key)
    except ValueError:  # an integer with more digits than Python prints
        return "…"
