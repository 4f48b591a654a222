"""Main memory that this process may take, within the share of a container."""

from collections.abc import Iterator
from pathlib import Path

import psutil


def text_of(path: Path) -> str | None:
    """The file's text, or None where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def machine_memory(root: Path = Path("/")) -> tuple[int, int]:
    """Free and total bytes of main memory that this process may take: of a container, its share."""
    memory = psutil.virtual_memory()
    free, total = memory.available, memory.total
    for limit, used in _limits(root):
        free, total = min(free, max(limit - used, 0)), min(total, limit)
    return min(free, total), total


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of every control group around this process, in both versions of them that Linux has."""
    names = ("memory.max", "memory.current", "inactive_file")
    older = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for base, group, (limit_file, used_file, cache) in (
        (root / "sys/fs/cgroup", _group(root, ""), names),
        (root / "sys/fs/cgroup/memory", _group(root, "memory"), older),
    ):
        inside = base / group
        for folder in (inside, *inside.parents):  # a limit of any group above holds as well
            limit, used = _number(folder / limit_file), _number(folder / used_file)
            if limit is not None:
                yield limit, max((used or 0) - _statistic(folder / "memory.stat", cache), 0)
            if folder == base:
                break


def _group(root: Path, controller: str) -> str:
    """The control group of this process; in a container it is often the root."""
    for line in (text_of(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "")
        if controller in controllers.split(",") and ".." not in path.split("/"):
            return path.strip().lstrip("/")
    return ""


def _statistic(path: Path, name: str) -> int:
    """A figure of `memory.stat`; that of cached files is taken from what is used, since the kernel drops them."""
    pairs = (line.split() for line in (text_of(path) or "").splitlines())
    return next((int(p[1]) for p in pairs if len(p) == 2 and p[0] == name and p[1].isdecimal()), 0)


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none, as in "max" for no limit."""
    text = (text_of(path) or "").strip()
    return int(text) if text.isdecimal() else None
