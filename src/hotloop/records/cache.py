"""The folder of what hotloop made for this person and uses again: compiled code, and plans."""

import os
import stat
from pathlib import Path

from hotloop.printing.text import printable

_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


def cache_folder(name: str) -> Path:
    """Where things of one kind are kept; nothing is made yet."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HOTLOOP_CACHE") or Path(home, "hotloop")).expanduser() / name


def make_private(folder: Path) -> None:
    """Make a folder, and what is missing above it, for this person alone."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def why_foreign(path: Path) -> str | None:
    """Why somebody else may have made a file, or could replace it; None where only this person can.

    The file may be absent. Its folder must be this person's, as must be the folder above it, or the system's: in a
    place for everyone, such as /tmp, the sticky bit keeps others from replacing a folder.
    """
    if not hasattr(os, "getuid"):  # Windows, where modes say nothing
        return None
    for each in (path, path.parent, path.parent.parent):
        try:
            found = each.stat()
        except FileNotFoundError:
            continue
        above = each == path.parent.parent
        if found.st_uid != os.getuid() and not (above and found.st_uid == _ROOT):
            return f"{printable(str(each))} belongs to another user"
        if found.st_mode & _OTHERS and not (above and found.st_mode & stat.S_ISVTX):
            return f"{printable(str(each))} can be written by other users"
    return None
