"""Compiles the function with a backend that counts graphs, and compares its results for both branches."""

from collections.abc import Iterator
from typing import Any

import torch

from hotloop.apps.learn.judging import CheckVerdict, Ran

ON = ("cpu",)


def graphs_of(function: Any) -> int:
    """How many graphs torch.compile makes of a function."""
    found: list[Any] = []

    def look(graph: Any, _: Any) -> Any:
        found.append(graph)
        return graph.forward

    torch.compiler.reset()
    torch.compile(function, backend=look)(torch.rand(16) + 1)
    return len(found)


def check(ran: Ran) -> Iterator[CheckVerdict]:
    normalise = ran["normalise"]
    large, small = torch.linspace(0, 2, 9), torch.linspace(0, 0.4, 9)
    yield CheckVerdict(
        "large values are divided by the largest",
        torch.allclose(normalise(large), large * 2 / 4 - 0.5),
        "for values up to 2 the result is another than before: double, divide by the largest, take 0.5 off",
    )
    yield CheckVerdict(
        "small values are not divided",
        torch.allclose(normalise(small), small * 2 - 0.5),
        "values whose largest is at most 1 must not be divided: torch.where(largest > 1, x / largest, x)",
    )
    try:
        count = graphs_of(normalise)
    except Exception as error:  # noqa: BLE001  # whatever the compiler says about it
        yield CheckVerdict(
            "torch.compile makes one graph of it", False, f"it cannot be compiled: {error}".splitlines()[0]
        )
        return
    hint = f"there are {count} graphs: an `if` on a tensor needs its number in Python; torch.where picks on the device"
    if count == 0 or "disable" in ran.source:
        hint = "nothing is compiled at all: take the disable off, and let torch.where pick"
    elif ran.calls("item") or ran.calls("float"):
        hint = (
            ".item() and float() bring the number to Python, which breaks the graph: stay with tensors and torch.where"
        )
    yield CheckVerdict("torch.compile makes one graph of it", count == 1, hint)
