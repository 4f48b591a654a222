"""Levers: named changes from plan to plan, one class and one file each.

To add one, put a file with a subclass of `Lever` into this folder. It is found there, tried by the tuner in its
`order`, applied where a plan has pulled it, and documented by its docstring.
"""

import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module

from hotloop.levers.base import Lever, LeverTarget, UnknownLever
from hotloop.plan import Plan

__all__ = [
    "LEVERS",
    "NAMED",
    "Lever",
    "LeverTarget",
    "acting_levers",
    "added_levers",
    "in_words",
    "levers_of",
    "pulled_levers",
    "rounding_levers",
    "uncaptured",
    "without",
]

_OTHERS = ("__main__", "applied", "base", "flags")  # files of this folder that hold no lever, and may need all of them


def _found() -> Iterator[Lever]:
    """The levers in the files of this folder."""
    for file in pkgutil.iter_modules(__path__):
        if file.name not in _OTHERS:
            module = import_module(f"{__name__}.{file.name}")
            for each in vars(module).values():
                if isinstance(each, type) and issubclass(each, Lever) and each.__module__ == module.__name__:
                    yield each()


LEVERS: tuple[Lever, ...] = tuple(sorted(_found(), key=lambda lever: lever.order))
NAMED = {lever.name: lever for lever in LEVERS}


def levers_of(plan: Plan) -> list[str]:
    """The names of the levers that a plan has pulled.

    >>> levers_of(Plan(device="cuda", precision="bf16", graph=1))
    ['graph', 'bf16']
    """
    return [lever.name for lever in LEVERS if lever.is_pulled(plan)]


def in_words(plan: Plan) -> list[str]:
    """What a plan changes of the loop as written, in a person's words.

    >>> in_words(Plan("cuda", precision="bf16", graph=16, stream="resident"))
    ['data on the device', '16 steps per CUDA graph', 'bf16']
    """
    return [words for lever in LEVERS if lever.is_pulled(plan) and (words := lever.in_words(plan))]


def pulled_levers(plan: Plan) -> list[Lever]:
    """The levers that a plan has pulled, and one of class `UnknownLever` for each name that none goes by."""
    return [*(lever for lever in LEVERS if lever.is_pulled(plan)), *_unknown(plan)]


def added_levers(plan: Plan, begin: Plan) -> list[Lever]:
    """The levers that a plan has and another has not."""
    return [lever for lever in LEVERS if lever.is_pulled(plan) and not lever.is_pulled(begin)]


def rounding_levers(plan: Plan, begin: Plan) -> list[Lever]:
    """The levers that a plan has and another has not, and that round losses and gradients."""
    return [lever for lever in added_levers(plan, begin) if lever.tier == "B" and lever.changes_gradients]


def without(levers: Sequence[Lever], plan: Plan) -> Plan:
    """A plan without these levers."""
    for lever in levers:
        plan = lever.off(plan)
    return plan


def acting_levers(plan: Plan) -> list[Lever]:
    """The levers that are applied for a plan: those that it has pulled, and those that it has pulled in part."""
    return [*(lever for lever in LEVERS if lever.acts(plan)), *_unknown(plan)]


def uncaptured(plan: Plan) -> Plan:
    """A plan without CUDA graphs, and without the levers that are for captured steps alone.

    >>> uncaptured(Plan(device="cuda", graph=1, levers=("aligned", "row kernels"))).levers
    ('aligned',)
    """
    for lever in LEVERS:
        plan = lever.off(plan) if lever.for_captures and lever.is_pulled(plan) else plan
    return replace(plan, graph=0)


def _unknown(plan: Plan) -> Iterator[Lever]:
    known = {lever.name: lever for lever in LEVERS}
    for name in plan.levers:
        if name not in known:
            yield UnknownLever(name, "hotloop has no lever of that name")
        elif not known[name].is_pulled(plan):
            yield UnknownLever(name, "it has a setting of its own in `Plan`")
