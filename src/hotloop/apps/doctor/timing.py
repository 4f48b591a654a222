"""What is timed in a turn: training steps, or the batches of an evaluation."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from hotloop._torch import LoaderIterator
from hotloop.apps.doctor.diagnosis import Turn
from hotloop.device.clock import synchronize
from hotloop.scripts.training_steps import before_backward, before_each, differentiated

TURN = "turn"  # of an answer
EVALUATED, FIRST = 20, 2  # batches of an evaluation that are timed, and those before them
FEWEST = 3  # that are enough
PATIENCE = 100  # steps of later epochs, each cut short after one, until an evaluation is not waited for


class TimedSteps:
    """Times the steps after a warm-up, and collects the losses of all."""

    def __init__(self, warmup: int, steps: int) -> None:
        self._warmup, self._steps = warmup, steps
        self._made = 0
        self._begin = self._end = 0.0
        self._losses: list[Tensor] = []
        self._device = torch.device("cpu")

    @contextmanager
    def watching(self) -> Iterator[None]:
        with before_backward(self._keep_losses):
            yield

    def step(self, device: torch.device | None) -> bool:
        """A step has ended; whether that is enough."""
        self._made += 1
        if self._made not in (self._warmup, self._warmup + self._steps):
            return False
        synchronize(self._device)
        self._begin, self._end = self._end, time.perf_counter()
        return self._made > self._warmup

    def answer(self, *, has_ended: bool) -> dict[str, Any]:
        """The turn; None where the script ended before all of its steps were timed."""
        if has_ended:
            return {TURN: None, "steps": self._made}
        losses = tuple(float(loss) for loss in self._losses)
        return {TURN: Turn((self._end - self._begin) / self._steps, losses, _memory(self._device)).to_json()}

    def _keep_losses(self, *args: Any, **options: Any) -> None:
        for loss in differentiated(args, options):
            if loss.numel() == 1:
                self._losses.append(loss.detach().clone())
                self._device = loss.device


class TimedEvaluation:
    """Times the first batches of the evaluation that follows an epoch, which ends early: after a few steps.

    `end` is called when there are enough of them, before the code that follows the evaluation would run.
    """

    def __init__(self, steps: int, end: Callable[[], None]) -> None:
        self._steps, self._end = steps, end
        self._made = self._depth = 0
        self._read_from: Any = None  # the iterator of the last batch
        self._of_training: Any = None
        self._ended: list[float] = []  # when calls of a model ended
        self._means: list[Tensor] = []  # of what the models gave
        self._memory = 0
        self._device = torch.device("cpu")

    @contextmanager
    def watching(self) -> Iterator[None]:
        modules = nn.modules.module
        with (
            before_each(LoaderIterator, "__next__", self._read),
            before_backward(self._train),
            modules.register_module_forward_pre_hook(self._begin_call),
            modules.register_module_forward_hook(self._end_call, always_call=True),
        ):
            yield

    def step(self, device: torch.device | None) -> bool:
        """A step has ended; whether that is enough: the evaluation is over, or none comes."""
        self._made += 1
        return len(self._ended) >= FIRST + FEWEST or self._made > self._steps + PATIENCE

    def answer(self, *, has_ended: bool) -> dict[str, Any]:
        """The turn; None where there was no evaluation."""
        timed = len(self._ended) - FIRST
        if timed < FEWEST:
            return {TURN: None, "error": "a shortened epoch did not lead to the evaluation"}
        pace = (self._ended[-1] - self._ended[FIRST - 1]) / timed
        return {TURN: Turn(pace, tuple(float(mean) for mean in self._means), self._memory or None).to_json()}

    def _read(self, iterator: Any) -> None:
        if self._made >= self._steps and iterator is self._of_training:
            raise StopIteration
        self._read_from = iterator

    def _train(self, *args: Any, **options: Any) -> None:
        self._of_training = self._read_from

    def _begin_call(self, module: nn.Module, args: Any) -> None:
        self._depth += 1

    def _end_call(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth or module.training or self._made < self._steps:
            return
        if isinstance(output, Tensor):
            self._means.append(output.detach().float().mean())
            self._device = output.device
        if len(self._ended) + 1 in (FIRST, FIRST + EVALUATED):
            synchronize(self._device)
            if self._device.type == "cuda" and len(self._ended) < FIRST:
                torch.cuda.reset_peak_memory_stats(self._device)
        self._memory = max(self._memory, _memory(self._device) or 0)
        self._ended.append(time.perf_counter())
        if len(self._ended) == FIRST + EVALUATED:
            self._end()


def _memory(device: torch.device) -> int | None:
    """The peak of a GPU; on a CPU what the process has now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss) if device.type == "cpu" else None
