"""Which line of the person's own code is running, found fast enough to be asked for every operation."""

import sys
from functools import cache
from types import FrameType

from hotloop.apps.simulate.events import Place
from hotloop.placement.sites import OURS, is_installed


def here() -> Place | None:
    """The innermost line of the person's own code; of an installed program, the innermost that is not torch's."""
    frame: FrameType | None = sys._getframe(1)
    outside: FrameType | None = None
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind == "user":
            return _place(frame)
        if kind == "installed" and outside is None:
            outside = frame
        frame = frame.f_back
    return _place(outside) if outside is not None else None


def users(frame: FrameType) -> bool:
    """Whether a frame is the person's own code."""
    return is_users(frame.f_code.co_filename)


def is_users(file: str) -> bool:
    """Whether a file is the person's own code."""
    return _kind(file) == "user"


def _place(frame: FrameType) -> Place:
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@cache
def _kind(file: str) -> str:
    if file.startswith(OURS):
        return "ours"
    return "installed" if is_installed(file) else "user"
