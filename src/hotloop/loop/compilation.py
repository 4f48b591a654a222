"""Objectives as the compiler makes them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hotloop.loop.turns import Turn
from hotloop.objective import Objective
from hotloop.plan import Plan

MODES = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}  # the graphs are recorded here, of whole steps


def compiled_objectives(turns: tuple[Turn, ...], plan: Plan) -> dict[str, Objective]:
    """Each objective as the compiler makes it, when it is first called; none where the plan does not compile."""
    if plan.compile == "off":
        return {}
    mode = MODES[plan.compile]
    return {turn.name: torch.compile(turn.objective, mode=mode, dynamic=False) for turn in turns}


@contextmanager
def hushed() -> Iterator[None]:
    """A compilation without the compiler's advice, which is about what the levers try."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\._inductor")
        yield
