"""Measures the functions of the file, and compares with the answer."""

import time
from collections.abc import Iterator

from hotloop.apps.learn.judging import CheckVerdict, Ran

ON = ("cpu",)


def seconds_of(ran: Ran, step: int) -> dict[str, float]:
    """What each function takes in one step."""
    start = time.perf_counter()
    picture = ran["decode"](step)
    decoded = time.perf_counter()
    ran["augment"](picture)
    augmented = time.perf_counter()
    for _ in range(40):
        ran["log"](1.0)
    logged = time.perf_counter()
    return {"decode": decoded - start, "augment": augmented - decoded, "log": logged - augmented}


def check(ran: Ran) -> Iterator[CheckVerdict]:
    steps = [seconds_of(ran, step) for step in range(1, 8)]
    typical = {name: min(step[name] for step in steps) for name in steps[0]}
    right = max(typical, key=lambda name: typical[name])
    yield CheckVerdict(
        "the functions are as they were",
        right == "augment" and "sleep" in ran.source and "range(150)" in ran.source and "range(40)" in ran.source,
        "this exercise is to find the slow function, not to repair it: put it back",
    )
    told = ran["slowest"]
    hints = {
        "": "write the name of a function into `slowest`; time.perf_counter() before and after each call tells",
        "decode": "decode is slow in its first call alone, which loads a library: leave the first step out",
        "log": "log is called most often, and all of its calls together take little: add the times up",
        "train": "train holds all the others: its own share is what is left without them",
    }
    hint = hints.get(told, f"{told!r} is none of the functions: write decode, augment or log")
    yield CheckVerdict("`slowest` is the function that takes most of a step", told == right, hint)
