"""What a script saves is kept aside and read from there, so that no file of the person's changes.

Nothing that is kept has a name on the disk, so that whatever does not know of it fails and can do no harm.
"""

import atexit
import builtins
import errno
import io
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from hotloop.placement.sites import STANDARD, frames, is_in_packages

Replace = Callable[[Any, str, Any], None]  # an attribute of an owner; `setattr` where nothing is put back
_OTHERS = ("hotloop.", "torch._", "torch.hub", "torch.utils.cpp_extension", "torchvision.datasets", "triton.")
_CACHES = ("HF_HOME", "TORCH_HOME")  # variables that name a folder of caches, beside all with CACHE in their names


_PREFIX = "hotloop-saved-"


class SavedFile:
    """A file without a name, where the system can have one: empty, or with the contents of another."""

    def __init__(self, contents: str | None = None) -> None:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX)
        self.path = f"/proc/self/fd/{descriptor}" if sys.platform == "linux" else name
        weakref.finalize(self, os.close, descriptor)
        if sys.platform == "linux":
            Path(name).unlink()
        else:
            weakref.finalize(self, os.unlink, name)
        if contents is not None:
            with io.FileIO(contents) as source:
                self.write(source)

    def write(self, source: Any) -> None:
        with io.BufferedWriter(io.FileIO(self.path, "wb")) as file:
            shutil.copyfileobj(source, file, 2**20)


class SavedFiles:
    """Keeps what goes to a path through `torch.save` and safetensors, and answers for it as the disk would."""

    def __init__(self) -> None:
        self._kept: dict[str, SavedFile] = {}  # by path

    def install(self, replace: Replace) -> None:
        saving, loading = self.saving(torch.save), self._loading(torch.load)
        for module in (torch, torch.serialization):
            replace(module, "save", saving)
            replace(module, "load", loading)
        self.safetensors_saving(replace)
        self._moves(replace)

    def of(self, path: Any) -> SavedFile | None:
        """What was saved to a path, if something was."""
        return self._kept.get(self._key(path)) if self._kept and _is_path(path) else None

    def _takes(self, path: Any) -> bool:
        """Whether what is written there is kept aside."""
        return _is_path(path)

    def _key(self, path: Any) -> str:
        return os.path.realpath(os.fsdecode(path))

    def _keep(self, path: Any, kept: SavedFile) -> None:
        self._kept[self._key(path)] = kept

    def saving(self, save: Callable[..., None]) -> Callable[..., None]:
        def keep(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if not self._takes(f):
                save(obj, f, *args, **kwargs)
                return
            kept = SavedFile()
            save(obj, kept.path, *args, **kwargs)
            self._keep(f, kept)

        return keep

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(f: Any, *args: Any, **kwargs: Any) -> Any:
            kept = self.of(f)
            return load(f if kept is None else kept.path, *args, **kwargs)

        return fetch

    def safetensors_saving(self, replace: Replace) -> None:
        """Below `save_file` and `load_file`, which a program may have imported before."""
        serialize, write, safe_open = safetensors.serialize, safetensors.serialize_file, safetensors.safe_open

        def keep(tensors: Any, filename: Any, metadata: Any = None) -> None:
            if not self._takes(filename):
                write(tensors, filename, metadata)
                return
            kept = SavedFile()
            kept.write(io.BytesIO(serialize(tensors, metadata)))
            self._keep(filename, kept)

        def opened(filename: Any, *args: Any, **kwargs: Any) -> Any:
            kept = self.of(filename)
            return safe_open(filename if kept is None else kept.path, *args, **kwargs)

        for module in (safetensors, safetensors.torch):
            replace(module, "serialize_file", keep)
            replace(module, "safe_open", opened)

    def _moves(self, replace: Replace) -> None:
        """What scripts do with a checkpoint once it is saved: ask for it, copy it, rename it, delete it."""
        for module, names, call in (
            (os, ("stat",), self._stat),
            (shutil, ("copyfile",), self._copy),
            (os, ("rename", "replace"), self._move),
            (os, ("remove", "unlink"), self._remove),
            (shutil, ("copymode", "copystat"), self._dress),
        ):
            for name in names:
                replace(module, name, partial(call, getattr(module, name)))

    def _stat(self, stat: Callable[..., os.stat_result], path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        kept = self.of(path) if kwargs.get("dir_fd") is None and kwargs.get("follow_symlinks", True) else None
        return stat(path if kept is None else kept.path, *args, **kwargs)

    def _copy(self, copy: Callable[..., Any], src: Any, dst: Any, **kwargs: Any) -> Any:
        kept = self.of(src)
        if kept is None:
            self._kept.pop(self._key(dst), None)
            return copy(src, dst, **kwargs)
        self._keep(dst, kept)
        return dst

    def _move(self, move: Callable[..., None], src: Any, dst: Any, **kwargs: Any) -> None:
        old, new = self._key(src), self._key(dst)
        if kwargs or old not in self._kept:
            move(src, dst, **kwargs)
            self._kept.pop(new, None)
        for path in [path for path in self._kept if path == old or path.startswith(f"{old}/")]:
            self._kept[new + path.removeprefix(old)] = self._kept.pop(path)

    def _remove(self, remove: Callable[..., None], path: Any, **kwargs: Any) -> None:
        if kwargs or self.of(path) is None or os.path.islink(path):  # noqa: PTH114  # it may be bytes
            remove(path, **kwargs)
        else:
            del self._kept[self._key(path)]

    def _dress(self, dress: Callable[..., None], src: Any, dst: Any, **kwargs: Any) -> None:
        if self.of(src) is None:
            dress(src, dst, **kwargs)


class FilesAside(SavedFiles):
    """The same for every file that a script opens for writing, and none that was there before is moved or removed.

    What hotloop itself writes, and what fills a cache or is downloaded, is real: others read it, or the next run does.
    """

    def __init__(self) -> None:
        super().__init__()
        named = (Path(place) for name, place in os.environ.items() if "CACHE" in name or name in _CACHES)
        caches = (f"{place.resolve()}{os.sep}" for place in named if place.is_absolute())
        home = os.path.realpath(os.path.expanduser("~"))  # noqa: PTH111  # for `Path.home`, having none is an error
        self._real = ("/proc/", f"{home}{os.sep}.", *caches)
        self._gone: set[str] = set()  # what is on the disk, and not there for the script
        self._made: set[str] = set()  # files and folders that the script made on the disk

    def install(self, replace: Replace) -> None:
        atexit.register(self._remove_empty_folders, os.getpid())
        super().install(replace)
        opened = partial(self._open, builtins.open, os.open)
        for module in (builtins, io):
            replace(module, "open", opened)
        for owner, name, call in (
            (os, "open", self._create),
            (os, "mkdir", self._make),
            (shutil, "rmtree", self._fell),
        ):
            replace(owner, name, partial(call, getattr(owner, name)))

    def _remove_empty_folders(self, process: int) -> None:
        """What the script made and has nothing in it: all of that went aside."""
        if os.getpid() == process:  # not so in a process that was forked off
            for made in sorted(self._made, reverse=True):
                with suppress(OSError):
                    Path(made).rmdir()

    def _takes(self, path: Any) -> bool:
        if not _is_path(path) or _is_by_others():
            return False
        key = self._key(path)
        is_real = key.startswith(self._real) or Path(key).name.startswith(_PREFIX)
        if str(Path(key).parent) in self._gone:
            raise _absent(path)
        return not is_real and Path(key).parent.is_dir()  # without a folder the system has an error

    def _key(self, path: Any) -> str:
        entry = _entry(path)
        return entry if entry in self._kept or entry in self._gone else os.path.realpath(entry)

    def _keep(self, path: Any, kept: SavedFile) -> None:
        super()._keep(path, kept)
        self._gone.discard(self._key(path))

    def _open(
        self,
        opening: Callable[..., Any],
        open_file: Callable[..., int],
        file: Any,
        mode: str = "r",
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        kept = self._opened(file, mode) if _is_path(file) and not kwargs.get("opener") and len(args) < 6 else None
        if kept is not None:
            kwargs["opener"] = lambda _, flags: open_file(kept.path, flags & ~os.O_EXCL)
        return opening(file, mode, *args, **kwargs)

    def _opened(self, path: Any, mode: str) -> SavedFile | None:
        """What is opened instead; None where the system is to open a file, or to say why it cannot."""
        writes = bool(set(mode) & set("wax+"))
        if not (writes or self._kept or self._gone):
            return None
        key = self._key(path)
        kept, is_gone = self._kept.get(key), key in self._gone
        if is_gone and "r" in mode:
            raise _absent(path)
        if not writes or not self._takes(path):
            return kept
        if kept is not None and "x" in mode:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if kept is None and not is_gone:
            is_new = not os.path.lexists(key)
            is_fine = "r" not in mode if is_new else "x" not in mode and Path(key).is_file()
            if not is_fine or not os.access(Path(key).parent if is_new else key, os.W_OK):
                return None
            kept = None if is_new or "w" in mode else SavedFile(key)
        if kept is None or "w" in mode:
            kept = SavedFile()
        self._keep(path, kept)
        return kept

    def _stat(self, stat: Callable[..., os.stat_result], path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if self._gone and _is_path(path) and kwargs.get("dir_fd") is None and self._key(path) in self._gone:
            raise _absent(path)
        return super()._stat(stat, path, *args, **kwargs)

    def _copy(self, copy: Callable[..., Any], src: Any, dst: Any, **kwargs: Any) -> Any:
        return copy(src, dst, **kwargs)  # which opens files

    def _move(self, move: Callable[..., None], src: Any, dst: Any, **kwargs: Any) -> None:
        old, new = _entry(src), _entry(dst)
        if kwargs or old == new or not (self._takes(src) and self._takes(dst)):
            move(src, dst, **kwargs)
        elif Path(old).is_dir():
            if old not in self._made:
                raise PermissionError(errno.EPERM, "hotloop leaves folders where they were before", src)
            super()._move(move, src, dst)
            self._made = {new + each.removeprefix(old) if _is_in(each, old) else each for each in self._made}
        elif old in self._gone or not (old in self._kept or os.path.lexists(old)):
            raise _absent(src)
        else:
            self._kept[new] = self._kept.get(old) or SavedFile(old)
            self._gone.discard(new)
            Path(old).unlink()

    def _remove(self, remove: Callable[..., None], path: Any, **kwargs: Any) -> None:
        entry = _entry(path)
        if kwargs or not self._takes(path) or (Path(entry).is_dir() and not Path(entry).is_symlink()):
            remove(path, **kwargs)
            return
        if entry in self._gone or not (self._kept.pop(entry, None) or os.path.lexists(entry)):
            raise _absent(path)
        if entry in self._made:
            self._made.remove(entry)
            remove(path)
        elif os.path.lexists(entry):
            self._gone.add(entry)

    def _dress(self, dress: Callable[..., None], src: Any, dst: Any, **kwargs: Any) -> None:
        if self.of(src) is None and self.of(dst) is None:
            dress(src, dst, **kwargs)

    def _create(self, opening: Callable[..., int], path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        is_new = flags & os.O_CREAT and _is_path(path) and not kwargs and not os.path.lexists(path)
        descriptor = opening(path, flags, *args, **kwargs)
        if is_new:
            self._made.add(_entry(path))
        return descriptor

    def _make(self, make: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
        entry = _entry(path)
        if entry not in self._gone:
            make(path, *args, **kwargs)
            self._made.add(entry)
        self._gone.discard(entry)

    def _fell(self, fell: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
        entry = _entry(path)
        if entry in self._made or not self._takes(path) or not Path(entry).is_dir():
            fell(path, *args, **kwargs)
        else:
            for folder, _, files in os.walk(entry):
                self._gone.update((folder, *(str(Path(folder, name)) for name in files)))
        self._kept = {each: kept for each, kept in self._kept.items() if not _is_in(each, entry)}


def _is_path(path: Any) -> bool:
    return isinstance(path, str | bytes | os.PathLike)


def _entry(path: Any) -> str:
    """The full name of a path, of a link itself."""
    full = Path(os.fsdecode(path)).absolute()
    return os.path.join(os.path.realpath(full.parent), full.name)  # noqa: PTH118  # `resolve` would ask here again


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}{os.sep}")


def _absent(path: Any) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _is_by_others() -> bool:
    """Whether hotloop writes, or what compiles and downloads."""
    for frame in frames(sys._getframe(2)):
        file = frame.f_code.co_filename
        if file != __file__ and (is_in_packages(file) or not file.startswith((*STANDARD, "<frozen"))):
            return str(frame.f_globals.get("__name__", "")).startswith(_OTHERS)
    return False
