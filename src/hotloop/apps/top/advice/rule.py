"""`Advice`: what a person should know about the hardware, and what the rules that give it see."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from hotloop.apps.top.advice.recent import Recent
from hotloop.monitor.reading import Gpu, Process, Reading
from hotloop.printing.text import printable
from hotloop.records import Record

LONGEST_NAME = 40  # characters of a program's name in a sentence
COMPUTING_CPU = 20.0  # percent of a core from which a process with memory on a GPU is said to compute
COMPUTING_GPU = 2.0  # percent of utilisation from which a GPU is said to be computed on


@dataclass(frozen=True)
class Advice(Record):
    """Something worth saying, and by which rule."""

    rule: str  # a short name that stays
    gpu: int | None  # that it is about; None where it is about the host or several GPUs
    words: str  # a sentence, with the numbers that it rests on
    fix: str | None = None  # what to do


@dataclass(frozen=True)
class Moment:
    """What a rule may look at: the reading, the minute before it, and a clock that never jumps."""

    now: float  # seconds, steady
    reading: Reading
    recent: Recent


class Rule(Protocol):
    """A condition that is looked for in every reading."""

    def see(self, moment: Moment) -> Iterable[Advice]: ...


def name_of(process: Process, *more: str) -> str:
    """A process in a sentence, fit for a terminal, with what else there is to say of it.

    >>> name_of(Process(4711, None, "compute", name="python3", user="ann"), "asleep")
    'python3 (PID 4711 of ann, asleep)'
    """
    name = printable(process.name) if process.name else "a process that cannot be seen from here"
    if len(name) > LONGEST_NAME:
        name = name[: LONGEST_NAME - 1] + "…"
    owner = f" of {printable(process.user)}" if process.user else ""
    return f"{name} ({', '.join([f'PID {process.pid}{owner}', *more])})"


def share_of_memory(gpu: Gpu) -> float | None:
    """Percent of a GPU's memory that is in use."""
    if gpu.memory_used is None or not gpu.memory_total:
        return None
    return 100 * gpu.memory_used / gpu.memory_total


def computes(gpu: Gpu, recent: Recent) -> bool:
    """Whether someone works on a GPU, rather than merely holding its memory."""
    if (recent.mean(gpu.index, "utilisation") or 0.0) >= COMPUTING_GPU:
        return True
    return any(p.kind != "graphics" and (p.cpu or 0.0) >= COMPUTING_CPU for p in gpu.processes or ())
