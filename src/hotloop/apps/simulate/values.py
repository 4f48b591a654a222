"""What the simulated device answers when a script asks for a number: plausible, finite, and not for ever the same."""

import math
import operator
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from hotloop._torch import schema_of
from hotloop.apps.simulate.known import Known
from hotloop.placement.sites import Site

PATIENCE = 300  # equal answers at one line between two steps, before another is tried
LIMIT = 20_000  # answers at one line between two steps, before the script is ended

BEGINS, FALLS = 1.0, 0.99  # a loss falls slowly
LARGE = 700.0  # whose exponential is still a number

_COMPARES = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}
_HOTLOOP, _TORCH = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent)
_NEVER = {"isnan", "isinf", "isneginf", "isposinf"}
_KEEPS = {"any", "all", "logical_or", "logical_and", "bitwise_or", "bitwise_and", "mul", "sum", "max", "amax", "view"}
_NEGATES = {"logical_not", "bitwise_not"}


class Spinning(Exception):
    """A loop waits for a value that only a real GPU could compute."""

    def __init__(self, place: Site | None) -> None:
        self.place = place
        super().__init__("a loop waits for a value that only a real GPU could compute")


class Values:
    """Answers for tensors without data."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._asked: Counter[Site | None] = Counter()
        self._steps = 0
        self.invented: dict[Site, None] = {}  # lines that got a number which only a real GPU could compute
        self._dice = torch.Generator().manual_seed(0)  # of its own: the script's random numbers stay as they are
        self.flipped: set[Site] = set()  # lines at which another answer was tried

    def stepped(self) -> None:
        """A step was made, so nothing spins."""
        self._asked.clear()
        self._steps += 1

    def number(self, tensor: Tensor, place: Site | None) -> Any:
        """The answer to `.item()`, `float()`, `bool()`."""
        known = self._known.values(tensor)
        if known is not None:
            return known.item()
        if place is not None:
            self.invented[place] = None
        self._asked[place] += 1
        asked = self._asked[place]
        if asked > LIMIT:
            raise Spinning(place)
        turn = asked // PATIENCE
        if turn and place is not None:
            self.flipped.add(place)
        if tensor.dtype == torch.bool:
            return _hint(tensor, default=True) ^ bool(turn % 2)
        if tensor.dtype.is_complex:
            return 1.0 + 0.0j
        if tensor.dtype.is_floating_point:
            return (self._loss, 0.0, LARGE, -1.0)[turn % 4]
        return (1, 0, 2**20, -1)[turn % 4]

    @property
    def _loss(self) -> float:
        return BEGINS * FALLS**self._steps

    def tensor(self, tensor: Tensor) -> Tensor:
        """A real tensor on the host in its place: what is known, or numbers between 0 and 1, zeros, truths."""
        known = self._known.values(tensor)
        if known is not None:
            return known.clone(memory_format=torch.preserve_format)
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        if tensor.dtype == torch.bool:
            return made.fill_(_hint(tensor, default=True))
        if made.numel() == 1 and tensor.dtype.is_floating_point:
            return made.fill_(self._loss)
        if tensor.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16) and made.numel() <= 1 << 22:
            return made.uniform_(0, 1, generator=self._dice)
        return made.zero_()


def hint(func: Any, args: tuple[Any, ...], result: Any) -> None:
    """Carry along what is known of truths: nothing is NaN or infinite here, so `isnan(loss).any()` is False."""
    if not isinstance(result, Tensor):
        return
    name = schema_of(func).name.removeprefix("aten::")
    told = _told(name, args)
    if told is not None:
        result._hotloop_truth = told  # type: ignore[attr-defined]


def _told(name: str, args: tuple[Any, ...]) -> bool | None:
    if name in _NEVER:
        return False
    if name in _COMPARES and isinstance(args[1], int | float) and args[0].numel() == 1 and args[0].is_floating_point():
        return bool(_COMPARES[name](BEGINS, args[1]))
    if name in ("eq", "ne"):
        itself = args[1] is args[0] or (isinstance(args[1], float) and math.isinf(args[1]))
        return ((args[1] is args[0]) == (name == "eq")) if itself else None
    if name in _KEEPS | _NEGATES:
        truths = [getattr(arg, "_hotloop_truth", None) for arg in args if isinstance(arg, Tensor)]
        if truths and None not in truths:
            both = any(truths) if "or" in name else all(truths)
            return both if name not in _NEGATES else not both
    if name == "any" and _asked_by_torch():  # whether an argument is wrong
        return False
    return None


def _asked_by_torch() -> bool:
    """Whether PyTorch's own code asks."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HOTLOOP):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def _hint(tensor: Tensor, *, default: bool) -> bool:
    return bool(getattr(tensor, "_hotloop_truth", default))
