"""Files and folders that survive a crash: synced, and never followed as links; the lock of a run's folder."""

import errno
import hashlib
import os
import re
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, ClassVar
from weakref import WeakValueDictionary

from hotloop.checkpoint.sums import SHARD, STATE, SUMS, TENSORS, Sum

if sys.platform != "win32":
    import fcntl

_RANK = re.compile(SHARD.pattern + r"(?:\.json|\.making)?", re.ASCII)  # what ranks write: shards, and receipts
LOCK = ".lock"  # in a folder of checkpoints, while a run saves into it
_TAKEN = (errno.EAGAIN, errno.EACCES)  # what POSIX lets `lockf` say of a lock that another process has


class Summing:
    """A file that hashes and counts the bytes that are written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._count = 0

    def write(self, data: memoryview | bytes) -> None:
        self._hash.update(data)
        self._count += len(data)
        self._file.write(data)

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
def opened(path: Path) -> Iterator[tuple[BufferedReader, int]]:
    """A file to read and its size; a link, a pipe or a device is a ValueError, and is not waited for."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    if path.is_symlink():
        raise ValueError(f"{path.name} is a link")
    with os.fdopen(os.open(path, flags), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path.name} is not a file")
        yield file, about.st_size


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk, where the system can."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove(folder: Path) -> None:
    """Remove a checkpoint: the files that hotloop writes and nothing else, whatever a folder may hold."""
    with suppress(OSError):
        if folder.is_symlink():
            folder.unlink()
            return
        for name in (SUMS, STATE, TENSORS, *filter(_RANK.fullmatch, os.listdir(folder))):  # noqa: PTH208
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


class InUse(Exception):
    """Another run saves into a folder; the message names its process where that is known."""


class FolderLock:
    """The lock of a folder that one run saves into, held until `release` or the death of the process.

    It is a record lock: a DataLoader's workers do not inherit it, so none of them can outlive a killed run with it.
    Where the system or the file system has no such locks, nobody holds one and everybody goes on. The file stays.
    """

    _held: ClassVar["WeakValueDictionary[tuple[int, Path], FolderLock]"] = WeakValueDictionary()

    def __init__(self, folder: Path) -> None:
        self._file: IO[bytes] | None = None
        if sys.platform == "win32":
            return
        key = os.getpid(), folder.resolve()
        if key in self._held:
            raise InUse("this very process")  # whose second lock would be granted
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.fdopen(os.open(folder / LOCK, flags, 0o666), "r+b", buffering=0)
        except OSError:
            return
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            with file:
                if error.errno in _TAKEN:
                    raise InUse(_holder(file)) from None
            return
        self._key, self._file = key, file
        self._held[key] = self
        with suppress(OSError):  # a full disk: then nobody knows which process it is
            file.truncate(0)
            file.write(f"{os.getpid()} {socket.gethostname()}".encode())

    def release(self) -> None:
        if self._file is not None:
            del self._held[self._key]
            self._file.close()
            self._file = None


def _holder(file: IO[bytes]) -> str:
    """Which process wrote itself into the file of a lock."""
    with suppress(OSError, ValueError):
        pid, host = file.read(300).decode().split()
        return f"process {int(pid)}" + ("" if host == socket.gethostname() else f" on {host}")
    return "another process"
