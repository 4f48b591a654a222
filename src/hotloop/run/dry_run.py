"""`DryRun`: a few steps of every part of a run, undone before it begins."""

import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.utils.data import DataLoader

from hotloop.checkpoint.reader import load
from hotloop.checkpoint.store import Store
from hotloop.data import Stream, length_of
from hotloop.data.origin import check_readable_again, twin
from hotloop.device.clock import synchronize
from hotloop.errors import BadArgument, HotloopError, PlanWarning
from hotloop.monitor.logs import targets_of, try_log
from hotloop.objective.batch_errors import attempt
from hotloop.printing.text import duration, plural
from hotloop.records import Epoch
from hotloop.run.callbacks import EpochRecord, StepRecord, asks_to_stop
from hotloop.run.core import Core
from hotloop.run.display import display_of, telling
from hotloop.run.part import FitArguments
from hotloop.run.training_data import Transform
from hotloop.step.eager import total
from hotloop.step.retry import OutOfMemory
from hotloop.step.training import TrainingStep
from hotloop.tune.scratch import scratch

if TYPE_CHECKING:
    from hotloop.run.loop import Loop


class DryRunFailed(HotloopError):
    """A part of a run failed in its dry run; `__cause__` is the error."""


class DryRun:
    """Tries each part of a run in turn; an error names the part.

    Its steps are real ones, without compilation and CUDA graphs, in the model's own memory. Afterwards it restores
    weights, optimizers, schedulers, generators, loaders, `stateful`, attributes of modules, datasets and hooks.
    """

    def __init__(
        self, loop: "Loop", core: Core, updates: int, asked: FitArguments, tell: Callable[[str], None]
    ) -> None:
        if isinstance(updates, bool) or not isinstance(updates, int) or updates < 1:
            raise BadArgument(f"dry_run={updates!r}", fix="give a number of steps to try, such as 3")
        if (size := core.ranks.size) > 1:
            raise BadArgument(f"dry_run= on {size} ranks", fix="try it in one process first, without torchrun")
        for given in (asked.loader, asked.validate):
            check_readable_again(
                given, fix="give what can be iterated again, such as a DataLoader, or leave out dry_run="
            )
        self._loop, self._core, self._updates, self._asked, self._tell = loop, core, updates, asked, tell
        self._done: list[str] = []  # names of the parts that work

    def run(self) -> str:
        """Try everything; returns a line on what worked and how long an epoch takes."""
        core, asked = self._core, self._asked
        hooks = [*asked.hooks.on_step, *asked.hooks.on_epoch]
        owners = (getattr(hook, "__self__", None) for hook in hooks)  # of methods
        others, loaders = [*core.stateful.values(), *hooks, *owners], {"": asked.loader, "validation ": asked.validate}
        known = [self._loop, core, *core.schedule.schedulers]
        scratch_space = scratch(core.subject, loaders, asked.transform, others, known)
        quiet = warnings.catch_warnings(action="ignore", category=PlanWarning)  # the run tells it
        with core.switch.unplanned(), ExitStack() as undo, scratch_space as space, quiet:
            undo.callback(core.schedule.snapshot().restore)
            plan = replace(core.switch.step.plan, compile="off", graph=0)
            memory = OutOfMemory(core.subject.modules, core.subject.device, most=plan.micro_batch)
            step = core.subject.step_for(plan, after_update=core.schedule.after_update, memory=memory)
            space.exchange(step)
            epoch, seconds = self._train(step)
            scores, more = self._evaluate()
            epoch = replace(epoch, metrics=scores)
            with self._part("scheduler", core.schedule.watches_a_metric):
                core.schedule.after_evaluation(epoch, asked.metrics)
            with self._part("on_epoch", bool(asked.hooks.on_epoch)):
                record = EpochRecord(epoch, step.counts.steps, self._loop, dry_run=True)
                asks_to_stop(asked.hooks.on_epoch, record, "on_epoch")
            with self._part("saving", asked.saver is not None):
                self._save()
            with self._part("logging", bool(targets_of(asked.log))), tempfile.TemporaryDirectory() as folder:
                for target in targets_of(asked.log):
                    try_log(target, Path(folder), {"loss": epoch.loss})
        length = length_of(asked.loader)
        time_of = f"a batch takes {duration(seconds)}"
        if length is not None:
            time_of = f"an epoch takes about {duration(seconds * length + more)}"
        return f"dry run: {plural(step.counts.steps, 'step')} of {', '.join(self._done)} worked; {time_of}"

    def _train(self, step: TrainingStep) -> tuple[Epoch, float]:
        """Try training and its hooks; returns the epoch so far and the seconds of a batch."""
        losses: list[Tensor] = []
        items, times = 0, [time.perf_counter()]
        with self._first(self._asked.loader, self._updates * step.plan.accumulate, self._asked.transform) as batches:
            while True:
                with self._part("training", name_it=not losses):
                    if (batch := next(batches, None)) is None:
                        break
                    parts = attempt(partial(step, batch), self._core.subject.model, batch, f"batch {len(losses)}")
                    losses.append(total(parts))
                    items += step.weighing.items_in(batch)
                    synchronize(self._core.subject.device)
                with self._part("on_step", bool(self._asked.hooks.on_step), name_it=len(losses) == 1):
                    record = StepRecord(step.counts.steps, 1, len(losses), losses[-1], self._loop, dry_run=True)
                    asks_to_stop(self._asked.hooks.on_step, record, "on_step")
                times.append(time.perf_counter())
        with self._part("training", name_it=False):
            step.end_epoch()
        first = 1 if len(times) > 2 else 0  # in which libraries allocate and choose
        seconds = (times[-1] - times[first]) / max(len(times) - 1 - first, 1)
        mean = sum(float(loss) for loss in losses) / max(len(losses), 1)
        return Epoch(1, mean, items, times[-1] - times[0], {}, {}), seconds

    def _evaluate(self) -> tuple[dict[str, float], float]:
        """Try the validation; returns its scores and the seconds of a whole one."""
        if self._asked.validate is None:
            return {}, 0.0
        start = time.perf_counter()
        with self._part("validation"):
            with self._first(self._asked.validate, self._updates) as batches:
                some = list(batches)
            scores = self._loop.evaluate(some, self._asked.metrics, predict=self._asked.predict)
            self._asked.hooks.goal.check(scores)
        length = length_of(self._asked.validate)
        return scores, (time.perf_counter() - start) / self._updates * max(length or 0, self._updates)

    def _save(self) -> None:
        if (saver := self._asked.saver) is not None:
            with tempfile.TemporaryDirectory(dir=saver.folder, prefix=".dry-run-") as folder:
                load(Store(folder).save(0, self._loop.state_dict()))

    @contextmanager
    def _first(self, loader: Iterable[Any], count: int, transform: Transform | None = None) -> Iterator[Iterator[Any]]:
        """The first batches of a loader on the device, by workers of their own that end afterwards."""
        plan = self._core.switch.step.plan
        once = twin(loader, persistent_workers=False) if type(loader) is DataLoader else loader
        stream = Stream(once, self._core.subject.device, "direct", transform, pinned=plan.pinned, workers=plan.workers)
        with closing(cast("Generator[Any, None, None]", iter(stream))) as batches:
            yield islice(batches, count)

    @contextmanager
    def _part(self, name: str, is_there: bool = True, *, name_it: bool = True) -> Iterator[None]:
        """Context of a part of the run, whose errors become `DryRunFailed` with its name."""
        if is_there and name_it:
            self._done.append(name)
            self._tell(name)
        try:
            yield
        except HotloopError as error:
            raise DryRunFailed(f"dry run: {name}: {error.what}", fix=error.fix) from error
        except Exception as error:
            raise DryRunFailed(f"dry run: {name}: {type(error).__name__}: {error}") from error


def try_run(loop: "Loop", core: Core, updates: int, asked: FitArguments) -> None:
    """Carry out a dry run, and say how it went."""
    with telling("dry run", asked.progress) as tell:
        words = DryRun(loop, core, updates, asked, tell).run()
    display_of(1, None, asked.progress).say(words)
