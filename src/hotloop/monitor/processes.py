"""Who the processes on a GPU are: name, command line, user and CPU of each PID that the driver tells of."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from hotloop.monitor.host import LONGEST_COMMAND, decoded, or_none
from hotloop.monitor.reading import Process

WHOLE_MACHINE = "pid:[4026531836]"  # the kernel's constant for the PID namespace that contains all others
DRIVER_FILES = ("nvidia-uvm", "nvhost-", "nvmap", "dxg")  # CUDA opens one of them (Jetson, WSL); monitors do not
HOST_PIDS = (
    "the driver counts processes as the host does, so that some of them have no name in this container"
    " (fix: start it with `--pid=host`, in Kubernetes with `hostPID: true`)"
)


@dataclass
class Person:
    """A process that was found here, and what it told: all but the CPU is asked only once."""

    process: psutil.Process
    told: Process


class People:
    """The processes behind PIDs. It keeps those of the last reading only, so that it never grows.

    In a container, a driver may give PIDs of the host. Such a PID does not exist here, or worse, is that of another
    process. So outside the namespace of the whole machine a name is given only to a process that has a file of the
    driver open. `own` tells how many bytes this very process holds on each GPU: that tells its row from the others.
    """

    def __init__(self, proc: Path = Path("/proc"), own: Callable[[], Mapping[str, int]] | None = None) -> None:
        self._proc, self._own = proc, own or held_by_torch
        self._known: dict[int, Person] = {}
        self._trusted = sees_whole_machine(proc)

    def name(self, held: Mapping[str, tuple[Process, ...]]) -> tuple[dict[str, tuple[Process, ...]], str | None]:
        """The processes of each GPU, by UUID, and a sentence where some have no name because of a container."""
        foreign = self._meet({holder.pid for holders in held.values() for holder in holders})
        if foreign:
            held = self._with_myself(held, foreign)
        named = {gpu: tuple(_process(h, self._known.get(h.pid)) for h in holders) for gpu, holders in held.items()}
        nameless = any(holder.pid in foreign for holders in held.values() for holder in holders)
        return named, HOST_PIDS if nameless else None

    def _meet(self, pids: set[int]) -> set[int]:
        """Look at these processes, forget all others, and give back the PIDs that are not of this namespace."""
        before, self._known = self._known, {}
        for pid in pids | ({os.getpid()} & before.keys()):
            person = self._again(before[pid]) if pid in before else None
            person = person or (self._first(pid) if self._trusted or self._has_driver_open(pid) else None)
            if person is not None:
                self._known[pid] = person
        if self._trusted:
            return set()
        return pids - self._known.keys() - before.keys()  # one that was here before has ended

    def _with_myself(
        self, held: Mapping[str, tuple[Process, ...]], foreign: set[int]
    ) -> dict[str, tuple[Process, ...]]:
        """The same rows, with this process's own PID in the row that can only be its own."""
        own, me = self._own(), os.getpid()
        mine = {gpu: _which_is_mine(rows, foreign, own.get(gpu, 0)) for gpu, rows in held.items()}
        if any(pid is not None for pid in mine.values()) and me not in self._known and (person := self._first(me)):
            self._known[me] = person
        return {
            gpu: tuple(replace(row, pid=me) if row.pid == mine[gpu] else row for row in rows)
            for gpu, rows in held.items()
        }

    def _again(self, person: Person) -> Person | None:
        """The person of before; None where it has ended, or its PID is another's by now."""
        if not or_none(person.process.is_running):  # which compares the time of the start as well
            return None
        person.told = replace(person.told, cpu=or_none(person.process.cpu_percent))  # since the reading before
        return person

    def _first(self, pid: int) -> Person | None:
        """A process that was not seen before. It may end at any line of this; what it may not tell is None."""
        process = or_none(lambda: psutil.Process(pid))
        started = None if process is None else or_none(process.create_time)
        if process is None or started is None:
            return None
        or_none(process.cpu_percent)  # the first answer means nothing, the next is the difference to it
        command, parents = or_none(process.cmdline), or_none(process.parents)
        told = Process(
            pid,
            None,
            "",
            name=decoded(or_none(process.name)),
            command=decoded(_joined(command)) if command else None,
            user=decoded(or_none(process.username)),
            started=started,
            ours=os.getpid() in (pid, *(parent.pid for parent in parents or ())),
        )
        return Person(process, told)

    def _has_driver_open(self, pid: int) -> bool:
        try:
            files = list((self._proc / str(pid) / "fd").iterdir())
        except OSError:  # not there, or not for us to look at: nothing is proved
            return False
        links = (or_none(file.readlink) for file in files)  # any of which may have been closed by now
        return any(link is not None and link.name.startswith(DRIVER_FILES) for link in links)


def held_by_torch() -> dict[str, int]:
    """Bytes that torch holds in this process on each GPU, by NVML's UUID. Neither imports torch nor starts CUDA."""
    torch = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return {}
        held = {i: int(torch.cuda.memory_reserved(i)) for i in range(torch.cuda.device_count())}
        return {f"GPU-{torch.cuda.get_device_properties(i).uuid}": held[i] for i in held if held[i]}
    except Exception:  # noqa: BLE001  # half imported, or without CUDA: then it is not known
        return {}


def _which_is_mine(holders: tuple[Process, ...], foreign: set[int], least: int) -> int | None:
    """The PID that must be this process's, since no other row of the host holds as much as it is known to hold."""
    if any(h.pid == os.getpid() and h.pid not in foreign for h in holders):  # it is there under its own PID
        return None
    fitting = [h.pid for h in holders if h.pid in foreign and (h.memory is None or h.memory >= least)]
    return fitting[0] if least and len(fitting) == 1 else None


def _joined(command: list[str]) -> str:
    """The command line, cut before it is quoted: the kernel allows megabytes."""
    return shlex.join(argument[:LONGEST_COMMAND] for argument in command[:256])


def _process(holder: Process, person: Person | None) -> Process:
    return holder if person is None else replace(person.told, memory=holder.memory, kind=holder.kind)


def sees_whole_machine(proc: Path = Path("/proc")) -> bool:
    """Whether PIDs here are those of the driver; False where that cannot be told."""
    if not sys.platform.startswith("linux"):
        return True
    try:
        return str((proc / "self/ns/pid").readlink()) == WHOLE_MACHINE
    except OSError:
        return False
