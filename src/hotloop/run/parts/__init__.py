"""The parts of a run: each file is one, imports no other, and has all that a run knows of its subject.

A file can be deleted: the arguments that it serves are refused then, and the rest works.
"""

from collections.abc import Set
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from hotloop.errors import BadArgument
from hotloop.run.kernel import TrainingRun
from hotloop.run.part import FitArguments, Part, Parts, hooks_of, in_order

SERVES = {  # arguments of `fit` and of the loop
    "best": ("patience", "restore_best"),
    "checkpoint": ("save", "resume"),
    "hooks": ("on_step", "on_epoch"),
    "journal": ("log",),
    "loop_state": ("save",),
    "python_state": ("save",),
    "signals": ("time_limit",),
    "train_metrics": ("train_metrics",),
    "validation": ("validate",),
}
NEEDED_FOR = {  # no other run has them
    **{part: served for part, served in SERVES.items() if part not in ("best", "signals")},
    "journal": ("log", "monitor"),
    "progress": ("progress",),
}


def refuse_unserved(given: Set[str]) -> None:
    """Raise for arguments whose part is not there."""
    for name, arguments in SERVES.items():
        if name not in _names() and (unserved := [each for each in arguments if each in given]):
            raise BadArgument(
                f"{unserved[0]}= is done by hotloop/run/parts/{name}.py, which this installation lacks",
                fix="install hotloop again: pip install --force-reinstall hotloop; or leave the argument out",
            )


def parts_of_run(run: TrainingRun, asked: FitArguments, given: Set[str]) -> Parts:
    """The parts that a run has which was given these arguments."""
    wanted = [name for name in _names() if name not in NEEDED_FOR or not given.isdisjoint(NEEDED_FOR[name])]
    return Parts([_part_in(name)(run, asked) for name in wanted])


def hooks_by_part() -> dict[str, tuple[str, ...]]:
    """The hooks of each part that a run can have, in the order of the parts."""
    return {kind.name: hooks_of(kind) for kind in in_order([_part_in(name) for name in _names()])}


@cache
def _names() -> tuple[str, ...]:
    return tuple(module.name for module in iter_modules(__path__))


@cache
def _part_in(name: str) -> type[Part]:
    """The class of the part in a file."""
    module = import_module(f"{__name__}.{name}")
    kinds = (kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__)
    return next(kind for kind in kinds if issubclass(kind, Part))
