"""`Profiler`: warms up, looks at a step, records some, and makes a `Profile` of them."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from statistics import median
from typing import Any, Self
from weakref import WeakSet

import torch
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from hotloop._torch import LoaderIterator, has_compiled
from hotloop.data.on_device import is_constant
from hotloop.data.worker_count import bytes_in
from hotloop.device import pick
from hotloop.device.clock import synchronize
from hotloop.errors import BadArgument
from hotloop.placement.placing import resolve
from hotloop.printing.text import plural
from hotloop.profiling.advice import Loading
from hotloop.profiling.analysis import analyse
from hotloop.profiling.operation_log import OperationLog
from hotloop.profiling.profile_record import Profile
from hotloop.profiling.trace import EPOCH, ProfilerTrace
from hotloop.scripts.training_steps import after_each, around
from hotloop.version import versions

EARLY = 6  # steps of warm-up in which there is room for a look and a first recording
MOST_WARM_UP = 20  # plain steps of warm-up, where times do not settle
WARM_UP_PATIENCE = 60.0  # seconds for them
LEAST = 3  # steps that are compared to see whether times have settled


class Profiler:
    """Profiles the training steps inside its block; `step()` says that one has ended.

    The first steps warm up, and one of them is looked at operation by operation; then `steps` of them are recorded.
    A loop that ends before gets a profile of what there was.

    >>> weight = torch.ones(8, requires_grad=True)
    >>> optimizer = torch.optim.SGD([weight])
    >>> with Profiler("cpu", steps=3, warmup=1) as profiler:
    ...     while not profiler.done:
    ...         optimizer.zero_grad()
    ...         weight.square().sum().backward()
    ...         optimizer.step()
    ...         profiler.step()
    >>> profiler.profile.steps, profiler.profile.device
    (3, 'cpu')
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        steps: int = 20,
        warmup: int | None = None,
        name: str = "training",
        tell: Callable[[str], None] = lambda what: None,
    ) -> None:
        """By default `device` is where the weights are, and `warmup` lasts until steps take equally long."""
        if steps < 1 or (warmup is not None and warmup < 1):
            raise BadArgument(f"steps={steps}, warmup={warmup}", fix="both must be at least 1")
        self.done = False
        self.seen = 0  # steps
        self._device = None if device is None else torch.device(device)
        self._steps, self._warmup, self._name, self._tell = steps, warmup, name, tell
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._look: OperationLog | None = None
        self._recordings: list[ProfilerTrace] = []
        self._plain: list[float] = []
        self._loading = Loading()
        self._proper = False  # whether the warm-up is over
        self._course = self._run()
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        self._undo.callback(register_optimizer_step_pre_hook(self._begin_update).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._end_update).remove)
        self._undo.enter_context(around(DataLoader, "__iter__", self._noting_epochs))
        self._undo.enter_context(after_each(LoaderIterator, "__next__", self._see_batch))
        self._undo.callback(self._course.close)  # ends what is under way
        next(self._course)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def step(self, device: torch.device | None = None) -> None:
        """A step has ended; `device` is where, if no optimizer tells."""
        self.seen += 1
        self._device = self._device or device
        if not self.done:
            next(self._course, None)

    @property
    def trace(self) -> bytes:
        """What was recorded, for Perfetto or Chrome: a `.json.gz`."""
        return self._recording.trace

    @cached_property
    def profile(self) -> Profile:
        """Where the time went. An error where no whole step was recorded."""
        recording, look = self._recording, self._look
        device = self._where()
        return analyse(
            recording.events,
            look.seen if look else (),
            self._loading,
            tuple(self._notes(recording)),
            name=self._name,
            device=str(device),
            device_name=pick(device).name,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions(),
            skipped=recording.skipped,
            plain=median(self._plain[-LEAST:]) if len(self._plain) >= LEAST else None,
            memory=look.memory.samples() if look else (),
            peak_memory=recording.peak,
            ceilings={},
        )

    @property
    def _recording(self) -> ProfilerTrace:
        """The one with warmed-up steps, else the one of the warm-up."""
        for recording in reversed(self._recordings):
            if recording.steps > 0:
                return recording
        raise BadArgument(
            f"only {plural(self.seen, 'training step')} were made, and a profile needs at least 3",
            fix="profile a run that makes more steps",
        )

    def _run(self) -> Generator[None]:
        """What is done in which step; each `yield` lasts until a step has ended."""
        self._tell("warming up")
        yield  # the first step is like no other: memory is allocated, kernels are chosen
        if self._warmup is None or self._warmup >= EARLY:  # for loops that end before the recording proper
            # While a step is looked at PyTorch compiles nothing, and would remember that.
            yield from self._looked() if not has_compiled() else ()
            yield from self._recorded(2, settle=0)
        yield from self._warm_up()
        self._proper = True
        self._tell(f"profiling {plural(self._steps, 'step')}")
        yield from self._recorded(self._steps, settle=1)
        if self._look is None:
            yield from self._looked()
        self.done = True
        yield

    def _warm_up(self) -> Iterator[None]:
        """Plain steps, until they take equally long or as many as were asked for."""
        device = self._where()
        synchronize(device)
        begin = last = time.perf_counter()
        while self._warming(begin):
            yield
            synchronize(device)  # a host that runs ahead would be timed by itself
            now = time.perf_counter()
            self._plain.append(now - last)
            last = now

    def _warming(self, begin: float) -> bool:
        if self._warmup is not None:
            return self.seen < self._warmup
        patient = len(self._plain) < MOST_WARM_UP and time.perf_counter() - begin < WARM_UP_PATIENCE
        return patient and not settled(self._plain)

    def _looked(self) -> Iterator[None]:
        look = OperationLog(self._where(), lambda: self._optimizers)
        with look.looking():
            self._look = look
            yield

    def _recorded(self, steps: int, *, settle: int) -> Iterator[None]:
        """Record some steps; those before them are not counted, for the profiler warms up too."""
        recording = ProfilerTrace(self._where())
        self._recordings.append(recording)
        with recording.running():
            for _ in range(settle):
                yield
            recording.skipped = self.seen
            recording.begin()
            for _ in range(steps):
                yield
                recording.mark()

    def _where(self) -> torch.device:
        """The device: as it was said, or that of the weights."""
        if self._device is None:
            weights = (p for o in self._optimizers for group in o.param_groups for p in group["params"])
            self._device = next((p.device for p in weights if not p.is_cpu), torch.device("cpu"))
        return resolve(self._device)

    def _notes(self, recording: ProfilerTrace) -> Iterator[str]:
        if not self._proper or recording is not self._recordings[-1]:
            yield "The run ended before its steps had settled: these are steps of the warm-up."
        elif recording.steps < self._steps:
            yield f"The run ended after {plural(recording.steps, 'recorded step')} of the {self._steps} asked for."
        if self._look is None:
            yield "The run ended before a step could be looked at, so the lines of operations are unknown."

    def _noting_epochs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(loader: Any) -> Any:
            in_memory = is_constant(loader.dataset) or _is_list_of_tensors(loader.dataset)
            self._loading = replace(self._loading, workers=loader.num_workers, in_memory=in_memory)
            with record_function(EPOCH):
                return original(loader)

        return begin

    def _see_batch(self, batch: Any, _: Any) -> None:
        if not self._loading.batch_bytes:
            self._loading = replace(self._loading, batch_bytes=bytes_in(batch))

    def _begin_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers.add(optimizer)
        if self._look is not None:
            self._look.begin_update()

    def _end_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._look is not None:
            self._look.end_update()


def _is_list_of_tensors(dataset: Any) -> bool:
    """Whether a dataset is a plain list of tensors, or of tuples of them."""
    if not isinstance(dataset, list | tuple) or not dataset:
        return False
    first = dataset[0]
    return all(isinstance(each, torch.Tensor) for each in (first if isinstance(first, list | tuple) else (first,)))


def settled(times: Sequence[float]) -> bool:
    """Whether the last steps took about equally long, so that the warm-up is over.

    >>> settled([9.0, 1.0, 1.1, 1.0]), settled([9.0, 4.0, 1.0])
    (True, False)
    """
    last = list(times)[-LEAST:]
    return len(last) == LEAST and max(last) - min(last) <= 0.25 * median(last)
