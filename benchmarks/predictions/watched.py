"""A training on a real GPU, run as `python script.py` would run it and watched at the end of each step."""

import gc
import io
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from cases import STEPS
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from hotloop.scripts.as_main import Enough, run_as_main
from hotloop.step.rounds import Rounds

WARM = STEPS  # steps before anything is timed, and those after which the simulation ended
TIMED = 8
SPARE = 12  # steps that a gradient scaler may skip while it looks for its scale


class Device(Protocol):
    """What is asked of a device."""

    def cap(self, most: int) -> None: ...
    def peaks(self) -> tuple[int, int]: ...
    def mark(self) -> Any: ...
    def milliseconds(self, first: Any, second: Any) -> float: ...
    def settle(self) -> None: ...
    def forget(self) -> None: ...


class Gpu:
    """The CUDA device of this process."""

    def cap(self, most: int) -> None:
        """Let the allocator reserve so many bytes."""
        torch.cuda.set_per_process_memory_fraction(most / torch.cuda.get_device_properties(0).total_memory)

    def peaks(self) -> tuple[int, int]:
        """The most bytes that were allocated and reserved."""
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def mark(self) -> Any:
        """A point in the device's time, without waiting for it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second))

    def settle(self) -> None:
        torch.cuda.synchronize()

    def forget(self) -> None:
        """Begin again with an allocator that has nothing."""
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def run(script: Path, batch: int, steps: int, after_step: Callable[[int], None]) -> None:
    """Run a script until it ends or `after_step`, which is told how many there were, raises `Enough`."""
    rounds, made, count = Rounds(), Optimizer.__init__, 0

    def make(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        made(optimizer, *args, **kwargs)
        rounds.expect(id(optimizer))

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        nonlocal count
        if rounds.ends(id(optimizer)):
            count += 1
            after_step(count)

    hook = register_optimizer_step_post_hook(stepped)
    Optimizer.__init__ = make  # type: ignore[method-assign]
    main, argv, path = sys.modules["__main__"], sys.argv, sys.path[0]
    try:
        with suppress(Enough), redirect_stdout(io.StringIO()):
            run_as_main(str(script), ["--batch", str(batch), "--steps", str(steps)])
    finally:
        hook.remove()
        Optimizer.__init__ = made  # type: ignore[method-assign]
        sys.argv, sys.path[0] = argv, path
        sys.modules["__main__"] = main  # which lets go of all that the script has made
        gc.collect()


def timed(script: Path, batch: int, device: Device, ready: Callable[[], None]) -> dict[str, Any]:
    """Peaks and the time of a step; `ready` is called after the first steps, and returns when the device is free.

    Steps are timed on the device, from the end of one to the end of the next, so that the host runs ahead as it would.
    """
    marks: list[Any] = []
    early: tuple[int, int] = (0, 0)

    def after_step(count: int) -> None:
        nonlocal early
        if count == WARM:
            early = device.peaks()
            device.settle()
            ready()
        elif count > WARM:  # the first of these began on an idle device, so time is counted from its end
            marks.append(device.mark())
        if count == WARM + TIMED + 1:
            raise Enough

    run(script, batch, WARM + TIMED + 1 + SPARE, after_step)
    device.settle()
    late = device.peaks()  # not asked for before: it takes the host long enough to show in a short step
    steps = [device.milliseconds(a, b) for a, b in pairwise(marks)]
    return {
        "allocated": late[0],
        "reserved": late[1],
        "allocated_early": early[0],
        "reserved_early": early[1],
        "step_ms": _spread(steps) if steps else None,
        "steps": WARM + len(marks),
    }


def fits(script: Path, batch: int, device: Device) -> bool:
    """Whether the first steps of a training run without running out of memory; all of it is let go afterwards."""

    def after_step(count: int) -> None:
        if count == STEPS:
            device.settle()
            raise Enough

    try:
        run(script, batch, STEPS + SPARE, after_step)
    except torch.OutOfMemoryError:
        fitting = False
    else:
        fitting = True
    gc.collect()
    device.forget()
    return fitting


def bracket(fits: Callable[[int], bool], guess: int, *, within: float = 0.01) -> tuple[int, int]:
    """The largest batch that fits and the smallest that does not, looked for around a guess; 0 where none fits.

    >>> bracket(lambda batch: batch <= 103, 100)
    (103, 104)
    """
    low, high, step = 0, 0, max(1, int(within * guess))
    batch = max(guess, 1)
    while not low or not high:
        if fits(batch):
            low = batch
            batch += step
        else:
            high = batch
            if batch == 1:
                return 0, 1
            batch = max(batch - step, 1)
        step *= 2
    while high - low > max(1, int(within * low)):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high


def _spread(steps: list[float]) -> dict[str, float]:
    return {"median": statistics.median(steps), "low": min(steps), "high": max(steps)}


def quiet() -> None:
    """Nothing of a child is to be printed but what it tells."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())
