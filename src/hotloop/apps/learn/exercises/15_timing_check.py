"""Lets the stopwatch time a call that takes notes, and looks at the order of what happened."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from hotloop.apps.learn.judging import CheckVerdict, Ran

ON = ("gpu",)


def story(seconds_of: Any) -> list[str]:
    """What the stopwatch does: call, sync and clock, in their order."""
    told: list[str] = []
    clock = time.perf_counter

    def noted(name: str, call: Any) -> Any:
        return lambda *args, **options: (told.append(name), call(*args, **options))[1]

    with ExitStack() as stack:
        for name in ("perf_counter", "time", "monotonic", "perf_counter_ns", "time_ns", "monotonic_ns"):
            stack.enter_context(patch.object(time, name, noted("clock", getattr(time, name))))
        stack.enter_context(patch.object(torch.cuda, "synchronize", noted("sync", torch.cuda.synchronize)))
        stack.enter_context(patch.object(torch.accelerator, "synchronize", noted("sync", lambda *_: None)))
        seconds_of(lambda: told.append("call"))
    assert clock is time.perf_counter
    return told


def check(ran: Ran) -> Iterator[CheckVerdict]:
    measured = ran.calls("hotloop.measure", ran.function("seconds_of"))
    if measured:
        named = any(word.arg == "device" for word in measured[0].keywords)
        hint = "hotloop.measure waits for the device that it is told: hotloop.measure(call, device=…)"
        yield CheckVerdict("hotloop.measure warms up, synchronizes and repeats", named, hint)
        return
    told = story(ran["seconds_of"])
    clocks = [place for place, what in enumerate(told) if what == "clock"]
    if len(clocks) < 2:
        hint = "it must read time.perf_counter() before and after the call"
        yield CheckVerdict("the clock is read before and after", False, hint)
        return
    first, last = clocks[0], clocks[-1]
    yield CheckVerdict(
        "a call before the clock starts warms up",
        "call" in told[:first],
        "the first call loads libraries and is timed: make a call before `start = …`",
    )
    timed = [place for place in range(first, last) if told[place] == "call"]
    yield CheckVerdict(
        "the clock stops when the GPU is done",
        bool(timed) and "sync" in told[timed[-1] : last],
        "the call only queues its work: synchronize() after the call, before the clock is read again",
    )
    warm = [place for place in range(first) if told[place] == "call"]
    before = told[warm[-1] : first] if warm else told[:first]
    yield CheckVerdict(
        "the clock starts when the GPU has nothing left to do",
        "sync" in before,
        "work from before may still be queued and would be timed too: synchronize() just before `start = …`",
    )
