"""Checks of a checkpoint beyond types: it is compared with what this run would save itself, before anything changes."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hotloop._torch import metadata_of
from hotloop.checkpoint.damage import unusable
from hotloop.errors import BadArgument
from hotloop.levers.flags import FLAGS
from hotloop.printing.text import shorten
from hotloop.records import is_of
from hotloop.values.saved import Count, not_saved_there
from hotloop.values.tree import leaves, tensors_in

AS_IT_WAS = "build it as it was, or choose another folder for a new run"
UNSHAPED = "not shaped yet"
_SPARE = 1 << 20  # bytes that a state may take besides those that the file holds
_STATES = 624  # numbers in the state of NumPy's MT19937, which does not check the position in them


def require(is_sound: bool, where: str) -> None:
    """Raise where a part of a checkpoint is not as it should be."""
    if not is_sound:
        raise not_saved_there(where)


def is_real(value: Any) -> bool:
    """Whether it is a real number of any kind: Python's, NumPy's, or a tensor or array of one element."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, np.ndarray | np.generic):
        return value.size == 1 and value.dtype.kind in "iuf"
    return type(value) in (int, float)


def is_alike(mine: Any, theirs: Any, *, words: bool = True, lengths: bool = True) -> bool:
    """Whether a value is like another in types and shapes; `words`: equal strings and keys, `lengths`: of lists."""
    if is_real(mine):
        return is_real(theirs)
    if isinstance(mine, Tensor | np.ndarray):
        return type(theirs) is type(mine) and theirs.dtype == mine.dtype and theirs.shape == mine.shape
    if mine is None:
        return theirs is None or type(theirs) is bool or is_real(theirs)
    if type(mine) is str:
        return type(theirs) is str and (theirs == mine or not words)
    if isinstance(mine, Mapping):
        if not isinstance(theirs, Mapping) or (words and mine.keys() != theirs.keys()):
            return False
        pairs: Iterable[tuple[Any, Any]] = ((mine[key], item) for key, item in theirs.items() if key in mine)
    elif isinstance(mine, list | tuple):
        if type(theirs) is not type(mine) or (lengths and len(mine) != len(theirs)):
            return False
        pairs = zip(mine, theirs, strict=False)
    else:
        return type(theirs) is type(mine)
    return all(is_alike(*pair, words=words, lengths=lengths) for pair in pairs)


def is_plain(value: Any) -> bool:
    """Whether it is numbers and tensors, and lists and dicts of them."""
    return all(isinstance(leaf, Tensor | np.ndarray | np.number | bool | int | float | None) for leaf in leaves(value))


def is_state_of_generator(mine: Any, theirs: Any) -> bool:
    """Whether it is the rng state of a generator of the same kind."""
    if type(mine) is tuple and len(mine) == 3:  # of Python, whose last part is there while `gauss` has a number left
        mine = (*mine[:2], None)
    if not is_alike(mine, theirs):
        return False
    inner = theirs.get("state") if isinstance(theirs, Mapping) else None
    return not (isinstance(inner, Mapping) and "pos" in inner) or bool(0 <= inner["pos"] <= _STATES)


def check_module(name: str, mine: Mapping[str, str], theirs: Any) -> None:
    """Raise for the state_dict of another module than that of which `shapes_of` gives `mine`, or with odd versions."""
    require(is_of(dict[str, Any], theirs), name)
    versions = metadata_of(theirs)
    require(is_of(dict[str, dict[str, Any]] | None, versions), f"{name}, its versions")
    is_known = all(is_of(Count | None, layer.get("version")) for layer in (versions or {}).values())
    require(is_known, f"{name}, the version of a layer")
    check_tensors(name, mine, theirs)


def check_tensors(what: str, mine: Mapping[str, str], there: Mapping[str, Any]) -> None:
    """Raise for a state_dict with other names or shapes than those that `shapes_of` gives of the one here."""
    theirs = shapes_of(there)
    wrong = [n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n) and mine.get(n) != UNSHAPED]
    if wrong:
        first = sorted(wrong)[0]
        differ = "tensor differs" if len(wrong) == 1 else "tensors differ"
        raise BadArgument(
            f"the checkpoint is of another {what}: {len(wrong)} {differ} ({shorten(sorted(wrong), 3)});"
            f" {first} is {mine.get(first, 'not there')} here and {theirs.get(first, 'not there')} in the checkpoint",
            fix=AS_IT_WAS,
        )


def shapes_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Dtype and shape of each tensor of a state_dict, in words; `UNSHAPED` where the first batch decides."""
    return {name: _shape(value) for name, value in state.items()}


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return UNSHAPED if is_lazy(value) else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def check_count(what: str, here: int, there: int) -> None:
    """Raise where a checkpoint has more or fewer of something."""
    if here != there:
        raise BadArgument(f"the checkpoint has {there} {what}, and this loop has {here}", fix=AS_IT_WAS)


def check_sharing(state: Any, name: str) -> None:
    """Raise where a few tensors are referenced many times, each of which would become a copy."""
    several = [tensor for _, tensor in tensors_in(state)]
    once = {id(value): value for value in several}
    if sum(v.numel() for v in several) > 2 * sum(v.numel() for v in once.values()) + _SPARE:
        raise unusable(f"{name} names the same tensors again and again")


class OptimizerForm:
    """What a script builds of an optimizer, with which a state in a checkpoint must agree."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.name = type(optimizer).__name__
        self.is_of_pytorch = type(optimizer).__module__.partition(".")[0] == "torch"
        self.groups: list[dict[str, Any]] | None = None  # settings and numbers of parameters
        if has_own_state_dict(optimizer):
            return
        self.groups = [dict(group) for group in optimizer.state_dict()["param_groups"]]
        self.defaults = frozenset(optimizer.defaults)  # any other key of a group is the person's own
        self.shapes = [[None if is_lazy(p) else p.shape for p in group["params"]] for group in optimizer.param_groups]

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise for a state_dict without groups like those here, or with odd state of their parameters."""
        check_sharing(state, self.name)
        if self.groups is None:
            return
        groups: list[dict[str, Any]] = state.get("param_groups", [])
        saved: dict[Any, Any] = state.get("state", {})
        require(is_of(list[dict[str, Any]], groups) and isinstance(saved, dict), f"{self.name}.state")
        require(len(groups) == len(self.groups), f"{self.name}.param_groups")
        shapes = dict[Any, torch.Size | None]()
        for n, (mine, theirs) in enumerate(zip(self.groups, groups, strict=True)):
            if theirs.get("params") != mine["params"]:
                raise unusable(f"{self.name}.param_groups[{n}].params are not those that are here")
            for key in theirs.keys() - {"params", *FLAGS}:
                self._check_setting(n, key, mine.get(key), theirs[key])
            shapes |= dict(zip(mine["params"], self.shapes[n], strict=True))
            self._check_alike({p: saved[p] for p in mine["params"] if p in saved}, shapes)
        for key in saved.keys() - shapes.keys():
            require(type(key) is str and is_plain(saved[key]), f"{self.name}.state[{key!r}]")

    def _check_setting(self, n: int, key: str, mine: Any, theirs: Any) -> None:
        """A setting is like the one here, a list as good as a tuple; a key of the person's own holds what it likes,
        but for numbers that stay numbers."""
        if key not in self.defaults and not is_real(mine):
            return
        if isinstance(mine, list | tuple) and isinstance(theirs, list | tuple):
            mine, theirs = tuple(mine), tuple(theirs)
        require(is_alike(mine, theirs), f"{self.name}.param_groups[{n}].{key}")

    def _check_alike(self, saved: Mapping[Any, Any], shapes: Mapping[Any, torch.Size | None]) -> None:
        """Raise where the parameters of a group have other state than one another: what one optimizer keeps of each
        parameter depends on its settings and on the number of dimensions alone."""
        first: dict[int, Any] = {}
        for key, held in saved.items():
            require(isinstance(held, dict) and is_plain(held), f"{self.name}.state[{key!r}]")
            shape = shapes[key]
            if held and shape is not None and self.is_of_pytorch:
                kinds = {name: _kind(value, shape) for name, value in held.items()}
                if first.setdefault(len(shape), kinds) != kinds:
                    raise unusable(f"{self.name}.state[{key!r}] is unlike that of other parameters")


def _kind(value: Any, shape: torch.Size) -> str:
    """What an optimizer's value of a parameter is: in its shape, one number, another tensor, or something else."""
    if not isinstance(value, Tensor):
        return "number" if is_real(value) else type(value).__name__
    if not (value.is_floating_point() or value.is_complex()):
        return str(value.dtype)
    return "like the parameter" if value.shape == shape else "one" if value.numel() == 1 else "tensor"


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Whether an optimizer has overridden PyTorch's `state_dict`."""
    return type(optimizer).state_dict is not Optimizer.state_dict
