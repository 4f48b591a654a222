"""What a person gets who says nothing: whole runs of `fit` by the wall clock, beside the tutorial's loop.

The rate of the tutorial's loop says how many epochs it does in a run of so many seconds. `fit` then trains as many with
everything counted: building the `Loop`, trials, captures, compilation, the report.
"""

import copy
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch.utils.data import Subset, TensorDataset

from harness.about import begun
from harness.contestants import DoesNotApply, Start, contestants
from harness.contestants.hot import in_words, loop_of
from harness.contestants.protocol import Losses
from harness.curves import curves
from harness.records import DEFAULT, Benchmark, Curves, EndToEnd, WholeRun
from harness.running import Tell, collect, failure, fresh_start
from harness.switches import OwnSwitches
from harness.workloads import Workload, workload
from harness.workloads.plans import plans_by_hand
from hotloop.device.clock import synchronize
from hotloop.errors import BadArgument, HotloopError
from hotloop.plan import Plan
from hotloop.printing.text import count, duration, plural

PEERS = ("careful", "trainer")
WARM_UP = 10  # steps that are not timed
PEER_SECONDS = 5.0
TUTORIAL = 20.0  # seconds
QUICK = 0.01  # of the length of everything, to see that it works
CACHES = ("HOTLOOP_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@dataclass(frozen=True)
class WholeRuns:
    """What to run."""

    workloads: tuple[str, ...]
    devices: tuple[torch.device, ...]
    lengths: tuple[float, ...] = (10.0, 45.0)  # seconds of the tutorial's loop
    tutorial: float = TUTORIAL  # seconds that its rate is taken from, at most
    peers: tuple[str, ...] = PEERS
    plans: bool = False  # also the plans that are written down for each workload
    compiled: bool = True  # also those of them that compile
    warm: bool = False  # each length once more with the caches that it left
    curve_steps: int = 0  # of the losses that are compared step by step; 0 for none
    quick: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [seconds for seconds in (*self.lengths, self.tutorial) if not 0 < seconds < math.inf]
        if wrong or not self.lengths:
            given = f"{wrong[0]:g} seconds" if wrong else "no length"
            raise BadArgument(f"a run of {given}", fix="give lengths above 0, such as 10,45")

    @property
    def scale(self) -> float:
        return QUICK if self.quick else 1.0

    def by_hand(self, name: str, device: torch.device) -> list[Plan]:
        """The plans that are run for a workload beside the default."""
        plans = plans_by_hand(name, device) if self.plans else ()
        return [plan for plan in plans if self.compiled or plan.compile == "off"]

    @property
    def warm_up(self) -> int:
        return 2 if self.quick else WARM_UP

    @property
    def most_seconds(self) -> float:
        """Of one workload where hotloop is as fast as the tutorial and no more; plans by hand come on top."""
        runs = sum(self.lengths) * (2 if self.warm else 1)
        return self.scale * (self.tutorial + runs + PEER_SECONDS * len(self.peers))


def run_end_to_end(
    setup: WholeRuns,
    *,
    command: str = "",
    tell: Tell = lambda _: None,
    keep: Callable[[Benchmark], object] = lambda _: None,
) -> Benchmark:
    """All workloads; what cannot run is recorded with its reason, and the rest goes on.

    `keep` is handed what there is after each part, so that a benchmark that is cut short leaves what it measured.
    """
    rows: list[EndToEnd] = []
    drawn: list[Curves] = []
    failures: list[str] = []
    contestants(setup.peers)  # a name that does not exist is told before any work
    about = begun(setup.devices, command, quick=setup.quick)

    def so_far(*unfinished: EndToEnd) -> Benchmark:
        return replace(about, curves=tuple(drawn), failures=tuple(failures), end_to_end=(*rows, *unfinished))

    for device in setup.devices:
        for name in setup.workloads:
            label = f"{name} on {device}"
            try:
                tell(f"{label}: at most about {duration(setup.most_seconds)}{_for_plans(name, device, setup)}")
                trial = _Trial(_prepared(name, device, setup), device, setup, tell)
                for row in trial.rows():
                    keep(so_far(row))
                rows.append(trial.row())
                if setup.curve_steps and trial.plan is not None:
                    tell(f"{label}: loss of {plural(setup.curve_steps, 'step')} beside the tutorial's")
                    fresh_start(device)
                    drawn.append(curves(trial.work, device, setup.curve_steps, plan=trial.plan))
            except Exception as error:  # noqa: BLE001  # one workload that cannot run must not end the others
                failures.append(failure(label, error, tell))
            keep(so_far())
            fresh_start(device)
    return so_far()


def _for_plans(name: str, device: torch.device, setup: WholeRuns) -> str:
    if not setup.plans:
        return ""
    each = sum(setup.lengths) * setup.scale * (2 if setup.warm else 1)
    return f", and {duration(each)} for each of {plural(len(setup.by_hand(name, device)), 'plan')} by hand"


def _prepared(name: str, device: torch.device, setup: WholeRuns) -> Workload:
    """The workload with a network that is made once and copied, since its first weights can take seconds."""
    made = workload(name, device, quick=setup.quick, seed=setup.seed)
    torch.manual_seed(setup.seed)
    return replace(made, network=partial(copy.deepcopy, made.network()))


@dataclass
class _Trial:
    """One workload on one device."""

    work: Workload
    device: torch.device
    setup: WholeRuns
    tell: Tell
    pace: "Pace | None" = None  # of the tutorial's loop
    peers: dict[str, float] = field(default_factory=dict)
    runs: list[WholeRun] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    plan: Plan | None = None  # of the last run for which none was given

    def rows(self) -> Iterator[EndToEnd]:
        """What there is after each part; without the tutorial's rate nothing can be compared."""
        self._time_tutorial()
        yield self.row()
        for name, start in contestants(self.setup.peers).items():
            self._attempt(name, partial(self._time_peer, name, start))
            yield self.row()
        plans: list[Plan | str] = ["auto", *self.setup.by_hand(self.work.name, self.device)]
        for length in self.setup.lengths:
            for plan in plans:
                self._whole_runs(length * self.setup.scale, plan)
                yield self.row()

    def row(self) -> EndToEnd:
        assert self.pace is not None
        return EndToEnd(
            workload=self.work.name,
            device=str(self.device),
            unit=self.work.unit,
            rate=self.pace.items_per_second * self.work.units_per_item,
            timed=self.pace.seconds,
            items=self.work.items,
            losses=self.pace.losses,
            peers=dict(self.peers),
            runs=tuple(self.runs),
            failures=tuple(self.failures),
            note=self.work.note,
        )

    def _time_tutorial(self) -> None:
        start = contestants(["tutorial"])["tutorial"]
        fresh_start(self.device)
        with OwnSwitches(self.device).turn():
            for _ in islice(self._steps(start), self.setup.warm_up):
                pass
            collect(self.device)
            seconds = self.setup.tutorial * self.setup.scale
            self.pace = pace_of(self._steps(start), self.work, self.device, seconds)
        self._say("tutorial", self.pace.items_per_second)

    def _time_peer(self, name: str, start: Start) -> None:
        fresh_start(self.device)
        seconds = PEER_SECONDS * self.setup.scale
        with OwnSwitches(self.device).turn():
            started = start(self.work.parts(), self.device)
            if started.steps is not None:
                rate = pace_of(
                    started.steps(), self.work, self.device, seconds, skip=self.setup.warm_up
                ).items_per_second
            else:
                epochs = max(1, round(seconds / max(started.run(1), 1e-6)))  # the first one warms up
                rate = epochs * self.work.items / started.run(epochs)
        self.peers[name] = rate * self.work.units_per_item
        self._say(name, rate)

    def _whole_runs(self, length: float, plan: Plan | str) -> None:
        name = DEFAULT if isinstance(plan, str) else repr(plan)
        with _own_caches():
            for warm in (False, True)[: 2 if self.setup.warm else 1]:
                what = f"{name}, run of {duration(length)}{', warm' if warm else ''}"
                if not self._attempt(what, partial(self._whole_run, name, length, plan, warm)):
                    break

    def _whole_run(self, name: str, length: float, plan: Plan | str, warm: bool) -> None:
        assert self.pace is not None
        work, epochs = of_length(self.work, self.pace.items_per_second * length)
        parts = work.parts()
        fresh_start(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with OwnSwitches(self.device).turn():
            synchronize(self.device)
            clock = time.perf_counter()
            loop = loop_of(parts, self.device, plan)
            report = loop.fit(parts.loader, epochs=epochs, device_transform=parts.device_transform, progress=False)
            synchronize(self.device)
            seconds = time.perf_counter() - clock
        items = sum(epoch.items for epoch in report.epochs)
        if report.interrupted:  # Ctrl-C, which `fit` takes as the wish to end with a report
            raise KeyboardInterrupt
        if items != epochs * work.items:
            raise HotloopError(f"it trained on {items:,} of {epochs * work.items:,} items")
        done = WholeRun(
            given=name,
            length=length,
            epochs=epochs,
            items=items,
            tutorial=items / self.pace.items_per_second,
            seconds=seconds,
            warm=warm,
            plan=repr(loop.plan),
            words=in_words(loop.plan),
            tuning=None if loop.tuning is None else str(loop.tuning),
            tuned=report.tuning,
            epoch=_settled([epoch.seconds for epoch in report.epochs]),
            losses=tuple(epoch.loss for epoch in report.epochs),
            peak_memory=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
        )
        self.runs.append(done)
        if name == DEFAULT:
            self.plan = loop.plan
        self.tell(
            f"{self.work.name} on {self.device}: {name}, {plural(epochs, 'epoch')} in {duration(seconds)},"
            f" the tutorial {duration(done.tutorial)}: {done.gain:.3g} times as fast{' (warm)' * warm}; {done.words}"
        )

    def _attempt(self, what: str, act: Callable[[], None]) -> bool:
        try:
            act()
        except DoesNotApply:
            return False
        except Exception as error:  # noqa: BLE001  # a part may fail in any way, and the others go on
            self.failures.append(failure(f"{self.work.name} on {self.device}: {what}", error, self.tell))
            return False
        finally:
            collect(self.device)
        return True

    def _steps(self, start: Start) -> Iterator[Losses]:
        started = start(self.work.parts(), self.device)
        assert started.steps is not None
        return started.steps()

    def _say(self, who: str, items_per_second: float) -> None:
        rate = count(items_per_second * self.work.units_per_item)
        self.tell(f"{self.work.name} on {self.device}: {who}, {rate} {self.work.unit} per second")


@dataclass(frozen=True)
class Pace:
    """How fast a loop is, and what it learned meanwhile."""

    items: int
    seconds: float
    losses: tuple[float, ...]  # of each whole epoch from its first step on, the mean over its items

    @property
    def items_per_second(self) -> float:
        return self.items / self.seconds


def pace_of(steps: Iterator[Losses], work: Workload, device: torch.device, seconds: float, *, skip: int = 0) -> Pace:
    """The pace of a loop over about so many seconds, without its first `skip` steps.

    Where nothing is skipped and an epoch is short enough, whole epochs are timed: each begins with a cost, such as
    workers that start, and has a fair share of it.
    """
    for _ in islice(steps, skip):
        pass
    synchronize(device)
    begin = time.perf_counter()
    done, ended = skip, 0
    epoch: list[torch.Tensor] = []
    losses: list[float] = []
    for each in steps:
        done += 1
        epoch += [loss.detach() for loss in each]
        if done % work.steps == 0:
            ended += 1
            if len(epoch) == work.steps * len(each):
                losses.append(_mean(epoch, work, len(each)))
            epoch = []
        passed = time.perf_counter() - begin
        if ended and not skip:
            if done % work.steps == 0 and passed * (ended + 1) / ended > seconds:
                break
        elif passed > seconds:
            break
    synchronize(device)
    passed = time.perf_counter() - begin
    _close(steps)
    return Pace(_items_after(done, work) - _items_after(skip, work), passed, tuple(losses))


def _mean(losses: list[torch.Tensor], work: Workload, objectives: int) -> float:
    """The mean over the items of an epoch; the losses of several objectives are summed."""
    by_step = torch.stack(losses).float().view(work.steps, objectives).sum(1)
    weights = torch.full((work.steps,), float(work.batch))
    weights[-1] = work.items - work.batch * (work.steps - 1)
    return float((by_step.cpu() * weights).sum() / work.items)


def _items_after(steps: int, work: Workload) -> int:
    epochs, rest = divmod(steps, work.steps)
    return epochs * work.items + min(rest * work.batch, work.items)


def _close(steps: Iterator[Losses]) -> None:
    """End a loop that has no end, and with it the workers of its loader."""
    close = getattr(steps, "close", None)
    if close is not None:
        close()


def of_length(work: Workload, items: float) -> tuple[Workload, int]:
    """The workload and a number of epochs for about so many items; of a long epoch only a part is taken."""
    if items >= work.items * 2 / 3:
        return work, max(1, round(items / work.items))
    few = max(1, round(items / work.batch)) * work.batch
    if few >= work.items:
        return work, 1
    dataset = work.dataset
    if isinstance(dataset, TensorDataset):  # a `Subset` of it would hide that it is made of tensors
        return replace(work, dataset=TensorDataset(*(each[:few] for each in dataset.tensors)), items=few), 1
    return replace(work, dataset=Subset(dataset, range(few)), items=few), 1


def _settled(epochs: list[float]) -> float | None:
    return statistics.median(epochs[len(epochs) // 2 :]) if len(epochs) > 1 else None


@contextmanager
def _own_caches() -> Iterator[None]:
    """New empty folders in place of the caches on disk."""
    before: Mapping[str, str | None] = {name: os.environ.get(name) for name in CACHES}
    with tempfile.TemporaryDirectory(prefix="hotloop-bench-", ignore_cleanup_errors=True) as folder:
        os.environ.update({name: str(Path(folder, name.lower())) for name in CACHES})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
