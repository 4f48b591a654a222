"""The door to rich: its import draws from Python's `random`, and a program's random numbers must not depend on ours."""

import random

_state = random.getstate()
from rich.console import Console  # noqa: E402
from rich.progress import (  # noqa: E402
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

random.setstate(_state)

__all__ = [
    "BarColumn",
    "Console",
    "MofNCompleteColumn",
    "Progress",
    "SpinnerColumn",
    "TextColumn",
    "TimeElapsedColumn",
    "TimeRemainingColumn",
]
