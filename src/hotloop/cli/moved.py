"""Spellings of the version before this one: each is an error that names the new one. The next version has none."""

import shlex

from hotloop.errors import BadArgument
from hotloop.printing.text import printable

MOVED = {
    ("train", "classify"): ("sprites", "train"),
    ("train", "draw"): ("sprites", "draw"),
    ("generate",): ("sprites", "generate"),
}


def refuse_moved(args: list[str]) -> None:
    """Raise for a command line whose verb has moved."""
    for old, new in MOVED.items():
        if tuple(args[: len(old)]) == old:
            _refuse(old, [*new, *args[len(old) :]])
    if args[:1] == ["evaluate"] and args[1:2] and args[1].endswith(".safetensors"):
        _refuse(("evaluate", args[1]), ["sprites", *args])


def _refuse(old: tuple[str, ...], new: list[str]) -> None:
    was, now = (printable(shlex.join(["hotloop", *words])) for words in (old, new))
    raise BadArgument(f"`{was}` has moved, to the verbs of sprites", fix=now)
