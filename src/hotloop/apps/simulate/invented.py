"""Numbers in place of those that only a real GPU could compute, and the branches of a script that hang on them."""

import ast
import linecache
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hotloop.placement.sites import Site, is_users, site_of

_HOTLOOP = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_COMPARES = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_COUNTS = (
    *(f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow") for side in ("", "r")),
    *("__neg__", "__pos__", "__abs__"),
)


class Branches:
    """Decisions of the script's own that depend on invented numbers, by line."""

    def __init__(self) -> None:
        self.seen: dict[Site, None] = {}  # in the order in which they were last made
        self.turned: set[tuple[str, int]] = set()  # lines at which the other way is taken

    def decide(self, truth: bool) -> bool:
        """The answer to a comparison; whoever makes it in the script's own code makes a branch."""
        place = _place(sys._getframe(1))
        return truth if place is None else self.at(place, truth)

    def at(self, place: Site, truth: bool) -> bool:
        self.seen.pop(place, None)
        self.seen[place] = None
        return truth ^ self.turns(place)

    def turns(self, place: Site | None) -> bool:
        """Whether the other way is taken at a line."""
        return place is not None and (place.file, place.line) in self.turned

    def marked(self, number: float) -> Any:
        """A number that remembers that it was invented, and so does what is computed from it."""
        if isinstance(number, bool) or not isinstance(number, int | float):
            return number
        made = (_Int if isinstance(number, int) else _Float)(number)
        made.branches = self
        return made


class _Float(float):
    branches: Branches

    def __bool__(self) -> bool:
        return self.branches.decide(self != 0.0)

    def __reduce__(self) -> Any:
        return float, (float.__float__(self),)

    __hash__ = float.__hash__


class _Int(int):
    branches: Branches

    def __bool__(self) -> bool:
        return self.branches.decide(int.__ne__(self, 0))

    def __reduce__(self) -> Any:
        return int, (int.__int__(self),)

    __hash__ = int.__hash__


def _comparing(kind: type, name: str) -> Callable[[Any, Any], Any]:
    plain = getattr(kind, name)

    def compare(number: Any, other: Any) -> Any:
        truth = plain(number, other)
        return truth if truth is NotImplemented else number.branches.decide(truth)

    return compare


def _counting(kind: type, name: str) -> Callable[..., Any]:
    plain = getattr(kind, name)

    def count(number: Any, *others: Any) -> Any:
        result = plain(number, *others)
        return result if result is NotImplemented else number.branches.marked(result)

    return count


for _kind, _base in ((_Float, float), (_Int, int)):
    for _name in _COMPARES:
        setattr(_kind, _name, _comparing(_base, _name))
    for _name in _COUNTS:
        setattr(_kind, _name, _counting(_base, _name))


def is_test(place: Site | None) -> bool:
    """Whether the line is the condition of an `if`, a `while` or an `assert`."""
    return place is not None and any(place.line in lines for lines in _tests(place.file))


def asked_by_the_script() -> bool:
    """Whether the script's own code asks, and not a library that it calls."""
    return _place(sys._getframe(1)) is not None


def asked_by_torch() -> bool:
    """Whether PyTorch's own code asks."""
    frame = _asking(sys._getframe(1))
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def _asking(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(_HOTLOOP):
        frame = frame.f_back
    return frame


def _place(frame: FrameType | None) -> Site | None:
    """The line that asks, if it is the script's own."""
    frame = _asking(frame)
    if frame is None or not is_users(frame):
        return None
    return site_of(frame)


@cache
def _tests(file: str) -> tuple[range, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    found = [node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.While | ast.Assert | ast.IfExp)]
    return tuple(range(test.lineno, (test.end_lineno or test.lineno) + 1) for test in found)
