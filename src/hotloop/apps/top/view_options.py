"""What a person has chosen to see, and what each key changes about it."""

from dataclasses import dataclass, replace
from types import MappingProxyType

SORTS = MappingProxyType({"m": "memory", "c": "CPU", "a": "age", "u": "user", "p": "PID", "g": "GPU"})
QUIT = frozenset({"q", "Q"})
STEPS = MappingProxyType({"up": -1, "down": 1, "page up": -10, "page down": 10})
LONGEST_NAME = 64


@dataclass(frozen=True)
class ViewOptions:
    """The order and choice of processes, and what is open on the screen."""

    sort: str = "memory"  # one of the values of SORTS
    user: str = ""  # only processes of users with this in their name
    typed: str | None = None  # the name that is being typed into the filter
    skipped: int = 0  # processes scrolled away
    help: bool = False
    keys: bool = True  # whether keys can be pressed at all
    me: str | None = None  # whose processes are marked as yours


def press(options: ViewOptions, key: str) -> ViewOptions | None:
    """The options after a key; None where it ends the view.

    >>> press(ViewOptions(), "c").sort, press(ViewOptions(), "q")
    ('CPU', None)
    """
    if options.typed is not None:
        return _type(options, options.typed, key)
    if key in QUIT:
        return None
    if options.help:  # whatever it is, it closes the help
        return replace(options, help=False)
    if key in ("?", "h"):
        return replace(options, help=True)
    if key == "f":
        return replace(options, typed=options.user)
    if key == "escape":
        return replace(options, user="", skipped=0)
    if key in SORTS:
        return replace(options, sort=SORTS[key], skipped=0)
    if key in STEPS:
        return replace(options, skipped=max(options.skipped + STEPS[key], 0))
    return options


def _type(options: ViewOptions, typed: str, key: str) -> ViewOptions:
    """A key while the name of a user is being typed."""
    if key == "enter":
        return replace(options, user=typed.strip(), typed=None, skipped=0)
    if key == "escape":
        return replace(options, typed=None)
    if key == "backspace":
        return replace(options, typed=typed[:-1])
    if len(key) == 1 and len(typed) < LONGEST_NAME:
        return replace(options, typed=typed + key)
    return options
