"""Which line of the person's own code is running: frames of torch and hotloop are stepped over."""

import ast
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

HOTLOOP = str(Path(__file__).parents[1])
OURS = (str(Path(torch.__file__).parent), HOTLOOP, "<frozen", "<string>")
PACKAGES = tuple(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
STANDARD = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib"))
TRANSFORMER = str(nn.modules.transformer.__file__)


@dataclass(frozen=True, slots=True)
class Site:
    """A line of source."""

    file: str
    line: int
    function: str = field(default="", compare=False)

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        where = f"{short(self.file)}:{self.line}"
        return f"{where}: {self.code}" if self.code else where


def as_buffer(attribute: str, made: Site | None) -> str:
    """What to write so that a plain tensor of a module moves with it; `made` is the line that made the tensor."""
    found = re.match(rf"self\.{attribute}\s*=\s*(.+)", made.code if made is not None else "")
    if found is not None and made is not None:
        with suppress(SyntaxError):  # a line that goes on
            value = ast.unparse(ast.parse(found[1], mode="eval"))
            where = f"{short(made.file)}:{made.line}"
            return f'self.register_buffer("{attribute}", {value})  # at {where}, to move with the model'
    return f'self.register_buffer("{attribute}", …) instead of self.{attribute} = … in __init__, to move with the model'


@cache
def is_in_packages(file: str) -> bool:
    """Whether a file is of an installed package, of this Python or of another whose packages are on the path."""
    return file.startswith(PACKAGES) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


@cache
def is_installed(file: str) -> bool:
    """Whether a file is of an installed package or of Python itself."""
    return file.startswith(STANDARD) or is_in_packages(file)


def frames(start: FrameType | None = None) -> Iterator[FrameType]:
    """The call stack from the inside out."""
    frame = start or sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]  # None ends the walk


def user_frames(start: FrameType | None = None) -> list[FrameType]:
    """The frames of the person's own code, innermost first; of an installed program, those that are not torch's."""
    outside = [f for f in frames(start or sys._getframe(1)) if not f.f_code.co_filename.startswith(OURS)]
    return [f for f in outside if not is_installed(f.f_code.co_filename)] or outside


def variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a frame, without leaving them there: before Python 3.13 the frame keeps the answer.

    What the person deletes afterwards would live on in it, a tensor of gigabytes as well.
    """
    kept = frame.f_locals
    found = dict(kept)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED and sys.getrefcount(kept) <= 3:
        kept.clear()  # nobody else has it: it is neither a module's namespace nor what `locals()` has given out
    return found


def is_in_package() -> bool:
    """Whether the innermost code outside torch, hotloop and Python's own library is of an installed package."""
    for frame in frames(sys._getframe(1)):
        file = frame.f_code.co_filename
        if is_in_packages(file) and not file.startswith(OURS):
            return True
        if not (file.startswith(OURS) or is_installed(file)):
            return False
    return False


def is_in_transformer() -> bool:
    """Whether PyTorch's transformer layers are what runs, and no layer of somebody else's inside them."""
    for frame in frames(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file == TRANSFORMER:
            return True
        if not file.startswith((*OURS, *STANDARD)):
            return False
    return False


def user_site() -> Site | None:
    """The innermost line of the person's own code; of an installed program, the innermost that is not torch's."""
    frame: FrameType | None = sys._getframe(1)
    outside: FrameType | None = None
    while frame is not None:  # runs for every operation, so it stops at the first hit
        file = frame.f_code.co_filename
        if is_users_file(file):
            return site_of(frame)
        if outside is None and not file.startswith(OURS):
            outside = frame
        frame = frame.f_back
    return site_of(outside) if outside is not None else None


def is_users(frame: FrameType) -> bool:
    """Whether a frame is the person's own code."""
    return is_users_file(frame.f_code.co_filename)


@cache
def is_users_file(file: str) -> bool:
    """Whether a file is the person's own code."""
    return not (file.startswith(OURS) or is_installed(file))


def is_hotloops(start: FrameType | None) -> bool:
    """Whether hotloop itself called torch at this frame, and neither the person's own code nor another library."""
    asking = (file for file in (frame.f_code.co_filename for frame in frames(start)) if not file.startswith(OURS[0]))
    return next(asking, "").startswith(HOTLOOP)


def site_of(frame: FrameType) -> Site:
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def short(file: str) -> str:
    """The path as the person would type it from where they stand."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file
