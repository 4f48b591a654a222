"""Files and folders that survive a crash: synced, locked while they are being made, and never followed as links."""

import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from hotloop.checkpoint.sums import STATE, SUMS, TENSORS, Sum

if sys.platform != "win32":
    import fcntl


class Summing:
    """A file that hashes and counts the bytes which pass through."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._count = 0

    def write(self, data: memoryview | bytes) -> None:
        self._hash.update(data)
        self._count += len(data)
        self._file.write(data)

    def readinto(self, buffer: memoryview) -> int:
        count: int = self._file.readinto(buffer)  # type: ignore[attr-defined]  # binary files have it
        self._hash.update(buffer[:count])
        self._count += count
        return count

    @property
    def sum(self) -> Sum:
        return Sum(self._count, self._hash.hexdigest())


@contextmanager
def written(path: Path) -> Iterator[Summing]:
    """A new file that is on the disk when the block ends."""
    with path.open("xb") as file:
        yield Summing(file)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def opened(path: Path) -> Iterator[tuple[Summing, int]]:
    """A file to read and its true size; a link, a pipe or a device is a ValueError, and is not waited for."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if path.is_symlink():
        raise ValueError(f"{path.name} is a link")
    with os.fdopen(os.open(path, flags), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path.name} is not a file")
        yield Summing(file), about.st_size


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk, where the system can."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def locked_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder that others can see is in use. What is left of it when the block fails is removed."""
    handle = None
    for _ in range(3):  # another process may take the folder for dead in the moment before it is locked
        folder = parent / f"{prefix}{os.getpid()}-{os.urandom(4).hex()}"
        folder.mkdir()
        handle = _lock(folder)
        if handle is not None and folder.is_dir():
            break
    try:
        yield folder
    except BaseException:
        remove(folder)
        raise
    finally:
        if handle is not None:
            os.close(handle)


def remove_dead(folder: Path) -> None:
    """Remove a folder that `locked_folder` made, unless the process that made it is still writing."""
    handle = _lock(folder)
    if handle is not None:
        try:
            remove(folder)
        finally:
            os.close(handle)


def remove(folder: Path) -> None:
    """Remove a checkpoint: the files that hotloop writes and nothing else, whatever a folder may hold."""
    with suppress(OSError):
        if folder.is_symlink():
            folder.unlink()
            return
        for name in (SUMS, STATE, TENSORS):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


def _lock(folder: Path) -> int | None:
    """A handle that holds the lock of a folder, which the system lets go of when the process dies; None if it is taken.

    Where a file system has no locks nobody gets one, so nothing there is ever taken for dead.
    """
    if sys.platform == "win32":
        return None
    handle = None
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if handle is not None:
            os.close(handle)
        return None
    return handle
