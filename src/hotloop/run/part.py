"""`Part`: something that a run has beside its steps. `Parts`: those of a run, in their order."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from hotloop.errors import BadArgument
from hotloop.objective.objectives import Predict
from hotloop.records import Epoch
from hotloop.run.callbacks import RunHooks
from hotloop.run.training_data import Transform
from hotloop.values.saved import HasState, all_or_nothing

if TYPE_CHECKING:
    from hotloop.metrics.evaluation import Metrics
    from hotloop.monitor.logs import Logged
    from hotloop.run.kernel import TrainingRun
    from hotloop.run.saving import Saver
    from hotloop.run.scores import Scored

AnyPart = TypeVar("AnyPart", "Part", "type[Part]")


@dataclass(frozen=True)
class FitArguments:
    """What a run was asked for; each part takes what is its own."""

    epochs: int
    loader: Iterable[Any]
    validate: Iterable[Any] | None
    transform: Transform | None
    metrics: "Metrics | None"
    predict: Predict
    hooks: RunHooks
    scored: "Scored | None"  # the criterion, where it adds up metrics
    saver: "Saver | None"
    time_limit: float | None  # seconds
    progress: bool | None
    monitor: bool
    log: "Logged"


class Part(HasState):
    """A part overrides the hooks that it needs, and costs nothing in the others.

    Fields of the type `Saved[…]` are in a checkpoint, are checked before they are loaded and undone if loading fails.
    Parts know of one another by the `TrainingRun` alone; `after` names those whose hooks come first.
    """

    after: ClassVar[tuple[str, ...]] = ()
    needs_epochs_now: bool = False  # whether an epoch must be known before the next one begins
    idle: tuple[str, ...] = ()  # hooks of its own that have nothing to do in this run
    may_be_new: bool = False  # whether a run may go on that did not have it
    differs: str | None = None  # why a resumed run may differ from one that never stopped
    says: str | None = None  # what else a person is told of a resumed run

    def __init__(self, run: "TrainingRun", asked: FitArguments) -> None:
        self.run = run

    def see_all(self, parts: "Parts") -> None:
        """For the one part that keeps the states of all."""

    # The moments of a run

    @contextmanager
    def around(self) -> Iterator[None]:
        """From before the first epoch to after the last one, however the run ends."""
        yield

    def begin(self) -> None:
        """Before the first epoch."""

    def begin_epoch(self) -> None:
        """Before the batches of an epoch, or of the rest of one."""

    def before_step(self, batches: int) -> None:
        """Before a step on a batch, or after one on several."""

    def after_step(self, loss: Tensor | None, batches: int) -> None:
        """After a step; `loss` is None after one on several batches."""

    def is_due(self) -> bool:
        """Whether it wants to save now."""
        return False

    def between_windows(self, ends: bool) -> None:
        """Where the run is to be saved, or ends, in the middle of an epoch."""

    def after_batches(self) -> None:
        """After the last batch of an epoch, and an update with it."""

    def end_epoch(self, whole: bool) -> None:
        """After the batches of an epoch, or of the part of one that was trained."""

    def known_epochs(self, wait: bool) -> Sequence[tuple[Epoch, bool]]:
        """The epochs whose losses are known by now, and whether they are whole; with `wait`, all that have ended."""
        return ()

    def complete(self, epoch: Epoch) -> Epoch:
        """The record of an epoch with what it knows of its training."""
        return epoch

    def before_evaluation(self) -> None:
        """Before an epoch is evaluated, which may be cut short."""

    def evaluate(self, epoch: Epoch) -> Epoch:
        """The record of an epoch with its scores."""
        return epoch

    def epoch_known(self, epoch: Epoch) -> None:
        """An epoch has its record, perhaps that of a part of it.

        Losses land late on a GPU: steps of the next epoch may have changed the weights, unless `needs_epochs_now`.
        """

    def epoch_done(self, epoch: Epoch) -> None:
        """The same where it was trained and evaluated whole."""

    def after_epoch(self) -> None:
        """After a whole epoch and everything that belongs to it."""

    def end(self) -> None:
        """After the last epoch."""

    def finish(self) -> None:
        """After that, in reverse order: the last words."""

    def close(self) -> None:
        """However the run ended, and where it did not begin."""

    def report(self) -> Mapping[str, Any]:
        """Its fields of the `Report`."""
        return {}

    # What a checkpoint holds of it

    def adapt(self, tree: dict[str, Any]) -> None:
        """Edit the tree of a checkpoint for this rank."""

    def before_load(self, state: Mapping[str, Any], undo: ExitStack) -> None:
        """Load what the loading of other parts depends on."""


HOOKS = (  # in the order of a run
    *("around", "begin", "begin_epoch", "before_step", "after_step", "is_due", "between_windows", "after_batches"),
    *("end_epoch", "known_epochs", "complete", "before_evaluation", "evaluate", "epoch_known", "epoch_done"),
    *("after_epoch", "end", "finish", "close"),
)


class Parts:
    """The parts of a run in their order; its methods call the hooks that they have for a moment."""

    begin: Callable[[], None]
    begin_epoch: Callable[[], None]
    before_step: Sequence[Callable[[int], None]]
    after_step: Sequence[Callable[[Tensor | None, int], None]]
    is_due: Sequence[Callable[[], bool]]
    between_windows: Callable[[bool], None]
    after_batches: Callable[[], None]
    end_epoch: Callable[[bool], None]
    before_evaluation: Callable[[], None]
    epoch_known: Callable[[Epoch], None]
    epoch_done: Callable[[Epoch], None]
    after_epoch: Callable[[], None]
    end: Callable[[], None]
    finish: Callable[[], None]
    close: Callable[[], None]
    _CALLED: ClassVar = (
        *("begin", "begin_epoch", "between_windows", "after_batches", "end_epoch"),
        *("before_evaluation", "epoch_known", "epoch_done", "after_epoch", "end", "close"),
    )

    def __init__(self, parts: Sequence[Part]) -> None:
        self.all = in_order(parts)
        self._hooks = [{*hooks_of(type(part))}.difference(part.idle) for part in self.all]
        for part in self.all:
            part.see_all(self)
        for hook in self._CALLED:
            setattr(self, hook, _each(self._having(hook)))
        self.finish = _each(self._having("finish")[::-1])
        for hook in ("before_step", "after_step", "is_due"):  # the kernel calls them itself, in every step
            setattr(self, hook, tuple(self._having(hook)))

    @property
    def evaluates(self) -> bool:
        """Whether epochs are evaluated."""
        return bool(self._having("evaluate"))

    @contextmanager
    def around(self) -> Iterator[None]:
        """All contexts, that of the first part outermost."""
        with ExitStack() as stack:
            for enter in self._having("around"):
                stack.enter_context(enter())
            yield

    def wants_to_save(self) -> bool:
        """Whether a part wants to save now."""
        return any(is_due() for is_due in self.is_due)

    def known_epochs(self, wait: bool) -> list[tuple[Epoch, bool]]:
        wait = wait or any(part.needs_epochs_now for part in self.all)
        several = [known(wait) for known in self._having("known_epochs")]
        return [each for known in several for each in known]

    def complete(self, epoch: Epoch) -> Epoch:
        for complete in self._having("complete"):
            epoch = complete(epoch)
        return epoch

    def evaluate(self, epoch: Epoch) -> Epoch:
        for evaluate in self._having("evaluate"):
            epoch = evaluate(epoch)
        return epoch

    def report(self) -> dict[str, Any]:
        """The fields of the `Report`."""
        return {name: value for part in self.all for name, value in part.report().items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of the run, by part."""
        return {part.name: state for part in self.all if (state := part.state_dict())}

    def check(self, tree: Any) -> None:
        """Raise for a checkpoint that is not one of this run."""
        for part in self.all:
            state = tree.get(part.name) if isinstance(tree, Mapping) else None
            if isinstance(state, Mapping):
                part.check(state)
            elif (part.saved_fields() or type(part).check is not HasState.check) and not part.may_be_new:
                raise BadArgument(
                    f"the checkpoint is not one of Loop.fit: it has nothing of the part {part.name!r}",
                    fix="choose another folder for this run",
                )

    def load(self, tree: dict[str, Any], check: Callable[[], None]) -> None:
        """Load a checkpoint; where it is of another run, or damaged, nothing has changed.

        `check` is called when the position is known, and raises where the rest of the run is impossible.
        """
        with all_or_nothing() as undo:
            self.check(tree)
            for part in self.all:
                part.adapt(tree)
            for load in ("before_load", "load"):
                for part in self.all:
                    getattr(part, load)(tree.get(part.name, {}), undo)
            check()
            for part in self.all:
                part.load_weights(tree.get(part.name, {}), undo)
            for part in self.all[::-1]:
                part.after_load(tree.get(part.name, {}))

    def _having(self, hook: str) -> list[Callable[..., Any]]:
        """The hooks of those parts that have one of their own."""
        return [getattr(part, hook) for part, own in zip(self.all, self._hooks, strict=True) if hook in own]


def hooks_of(kind: type[Part]) -> tuple[str, ...]:
    """The moments at which parts of a kind are called."""
    return tuple(hook for hook in HOOKS if getattr(kind, hook) is not getattr(Part, hook))


def in_order(parts: Sequence[AnyPart]) -> list[AnyPart]:
    """Each part behind those that it names in `after`, and else as they were given."""
    left, ordered = list(parts), list[AnyPart]()
    while left:
        waited_for = {part.name for part in left}
        ordered.append(next(part for part in left if waited_for.isdisjoint(part.after)))
        left.remove(ordered[-1])
    return ordered


def _each(hooks: Sequence[Callable[..., Any]]) -> Callable[..., None]:
    """A call of each of these."""
    if len(hooks) == 1:
        return hooks[0]

    def call(*given: Any) -> None:
        for hook in hooks:
            hook(*given)

    return call
