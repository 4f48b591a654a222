"""`pad_to`: sequences padded to a few lengths, so that batches come in a few shapes."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hotloop.errors import BadArgument
from hotloop.printing.text import shorten
from hotloop.values.tree import map_tensors, parts_of, path_to

Number = int | float | bool
# What fills each tensor that Hugging Face and PyTorch have a name for; a model that masks reads none of it.
BY_NAME: dict[str, Number] = {
    "input_ids": 0,
    "attention_mask": 0,
    "token_type_ids": 0,
    "position_ids": 0,
    "special_tokens_mask": 1,
    "inputs_embeds": 0.0,
    "input_values": 0.0,
    "decoder_input_ids": 0,
    "decoder_attention_mask": 0,
    "labels": -100,
    "key_padding_mask": True,
    "src_key_padding_mask": True,
    "tgt_key_padding_mask": True,
}
STAYS = ("pixel_values", "input_features")  # whose dimension 1 is of channels
MATRICES = ("attention_mask", "decoder_attention_mask")  # of two dimensions, or padding one of them is not enough


def pad_to(
    lengths: int | Sequence[int],
    *,
    values: Mapping[str | int, Number | None] | None = None,
    after: Callable[[Any], Any] | None = None,
) -> "Padding":
    """A function that pads the sequences of a batch, dimension 1, to the next multiple or to the next of `lengths`.

    `loop.fit(loader, device_transform=hotloop.pad_to(64))`: batches of texts then come in a few shapes in place of
    hundreds, and each shape that comes again and again gets a CUDA graph. `values` says with what to pad, by the name
    of a tensor or its position in a tuple, None to leave it as it is; the names that Hugging Face uses are known.
    `after` is a function whose result is padded: a transform of your own, or a `collate_fn`, to pad in the loader.
    A sequence longer than all `lengths` stays as it is.

    >>> batch = {"input_ids": torch.ones(2, 5).long(), "attention_mask": torch.ones(2, 5).long()}
    >>> pad_to(4)(batch)["attention_mask"].tolist()
    [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]]
    >>> pad_to([8, 32], values={0: 0, 1: -100})((torch.ones(2, 9).long(), torch.ones(2, 9).long()))[1].shape
    torch.Size([2, 32])
    """
    several = (lengths,) if isinstance(lengths, int) else tuple(lengths)
    if not several or not all(type(each) is int and each > 0 for each in several):
        raise BadArgument(f"lengths={lengths!r}", fix="give a whole number above 0, or several: pad_to([64, 128, 256])")
    return Padding(lengths if isinstance(lengths, int) else tuple(sorted(several)), dict(values or {}), after)


@dataclass(frozen=True)
class Padding:
    """What `pad_to` makes: called with a batch, it returns one of the same types with longer sequences."""

    lengths: int | tuple[int, ...]
    values: dict[str | int, Number | None]
    after: Callable[[Any], Any] | None = None

    def __call__(self, batch: Any) -> Any:
        if self.after is not None:
            batch = self.after(batch)
        leaves = list(_leaves(batch))
        if unknown := [key for key in self.values if not any(key in (leaf.path, leaf.key) for leaf in leaves)]:
            raise BadArgument(
                f"values= names {shorten([repr(key) for key in unknown], 4)}, and the batch has no such tensor",
                fix=f"it has {shorten([leaf.path for leaf in leaves], 8)}",
            )
        stays = [name for name in STAYS if name not in self.values]
        long = [leaf for leaf in leaves if leaf.tensor.ndim > 1 and leaf.key not in stays]
        if not long:
            raise BadArgument(
                "no tensor of the batch has sequences in dimension 1", fix="leave out pad_to, or give batches (N, L, …)"
            )
        first = min(long, key=lambda leaf: (leaf.key != "input_ids", leaf.key == "labels"))  # what the model reads
        names = {leaf.key for leaf in leaves}
        several = {leaf.path: self._padded(leaf, first, names) for leaf in long}
        padded = iter([several.get(leaf.path, leaf.tensor) for leaf in leaves])
        return map_tensors(batch, lambda _: next(padded))

    def _padded(self, leaf: "_Named", first: "_Named", names: set[str | int]) -> Tensor:
        tensor = leaf.tensor
        if leaf.path in self.values or leaf.key in self.values:
            value = self.values[leaf.path if leaf.path in self.values else leaf.key]
            return tensor if value is None else self._fill(leaf, value)
        length, alike = tensor.shape[1], tensor.shape[1] == first.tensor.shape[1]
        if self._next(length) == length or (leaf.key not in BY_NAME and not alike):
            return tensor
        if leaf.key not in BY_NAME:
            if leaf is not first or not tensor.is_floating_point():
                raise self._unknown(leaf, f"holds {_kind(tensor)} of unknown meaning")
            return self._fill(leaf, 0.0)
        if leaf.key == "labels" and tensor.is_floating_point():
            return tensor  # of whole texts: one number for each class
        if leaf.key == "labels" and not alike:
            raise self._unknown(leaf, f"has another length than {first.path}, and may not be a sequence")
        if leaf.key in MATRICES and tensor.ndim > 2:
            raise BadArgument(
                f"{leaf.path} has the shape {tuple(tensor.shape)}, of which more than one dimension would be padded",
                fix="give a mask of shape (N, L), from which the model makes its own",
            )
        if leaf.key == "input_ids" and "attention_mask" not in names:
            raise self._unknown(leaf, "comes without an attention_mask, so that padding would be read as text")
        return self._fill(leaf, BY_NAME[leaf.key])

    def _next(self, length: int) -> int:
        """The length that a sequence is padded to."""
        if isinstance(self.lengths, int):
            return -(-length // self.lengths) * self.lengths
        place = bisect_left(self.lengths, length)
        return self.lengths[place] if place < len(self.lengths) else length

    def _fill(self, leaf: "_Named", value: Number) -> Tensor:
        tensor = leaf.tensor
        more = self._next(tensor.shape[1]) - tensor.shape[1]
        if not more:
            return tensor
        if not tensor.is_floating_point() and not _holds(tensor.dtype, value):
            raise BadArgument(f"{leaf.path} is {tensor.dtype}, which cannot hold {value}", fix="give another value")
        return functional.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, more), value=value)

    def _unknown(self, leaf: "_Named", why: str) -> BadArgument:
        lengths = self.lengths if isinstance(self.lengths, int) else [*self.lengths]
        known = {**self.values, leaf.key: BY_NAME.get(leaf.key, 0) if isinstance(leaf.key, str) else 0}
        return BadArgument(
            f"{leaf.path}, of shape {tuple(leaf.tensor.shape)}, {why}: its padding value is unknown",
            fix=f"give it: pad_to({lengths}, values={known}), -100 for targets that the loss ignores, None to leave it",
        )


@dataclass(frozen=True)
class _Named:
    path: str  # the expression that reaches it
    key: str | int  # the last part of that
    tensor: Tensor


def _leaves(value: Any, path: str = "batch", key: str | int = 0) -> Iterator[_Named]:
    if isinstance(value, Tensor):
        yield _Named(path, key, value)
    for name, part in parts_of(value):
        yield from _leaves(part, path_to(path, value, name), name)


def _kind(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "True and False"
    return "numbers" if tensor.is_floating_point() or tensor.is_complex() else "whole numbers"


def _holds(dtype: torch.dtype, value: Number) -> bool:
    if dtype == torch.bool:
        return value in (0, 1)
    if dtype.is_complex:
        return True
    return math.isfinite(value) and value == int(value) and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max
