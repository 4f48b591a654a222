"""`Epochs`: the epochs of a loader one after the other, each of which can be begun where it was left: at a `Position`.

A run that goes on from a position gets exactly the batches that it would have got. These are the steps, in this order:

1. workers that persist between epochs are started where they had been, with nothing to load, and with the rng states
   that they had when the epoch began;
2. the rng states of the epoch's beginning are restored: global ones, generators of the loader, its samplers and its
   dataset, and what samplers tell of themselves;
3. the iterator is made, which draws from them what it drew then: a seed for workers, and from most samplers the order;
4. what the training has had is skipped. Indices are drawn and dropped where no more is needed; batches are loaded and
   dropped where workers make random items, because only that brings the workers to where they were; another number of
   workers makes other ones anyhow, from seeds of its own;
5. batches that had been read ahead are read again, each with the rng states that it was read with;
6. the generators of the loader get the states of the moment of the checkpoint, in case others draw from them too;
7. the caller restores the global states of that moment, and begins the epoch.

Steps 1 to 6 are `Epochs.resume`, and the epoch that is begun next goes on with what they left ready. Between two epochs
there is nothing to skip: only 1 and 6 are done, so that the next epoch begins as it would have. `Stream.change_workers`
goes through the same steps inside a run.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Generic, TypeVar

from hotloop.data.loader_rng import LoaderRng, LoaderRngState
from hotloop.data.origin import BatchOrigin
from hotloop.errors import BadArgument
from hotloop.printing.text import plural

T = TypeVar("T")
Tell = Callable[[int, int], None]  # batches that were loaded again so far, and in all
POSITION_FORMAT = 2
MOST_AHEAD = 4  # batches that a stream reads before they are trained on, at most


@dataclass(frozen=True)
class Position:
    """The position of a loader in its epoch: what it takes to resume with the same batches."""

    consumed: int | None  # batches of the epoch that the training has had; None between two epochs
    began: LoaderRngState  # when the epoch's iterator was made
    now: LoaderRngState  # when the position was asked for
    read: int = 0  # batches of the epoch that were read, those ahead of the training included
    ended: bool = False  # whether the loader had said that there are no more
    ahead: tuple[LoaderRngState, ...] = ()  # when each batch ahead was read, where that matters
    last: tuple[int, ...] | None = None  # the samples of the last batch that the training had
    begun: bool = False  # whether workers that persist were there when the epoch began
    workers: int = 0
    prefetched: int = 0  # batches that the workers are asked for in advance
    carried: tuple[LoaderRngState, ...] = ()  # the rng states of workers that persist, when the epoch began
    loader: Any = None  # the loader's own account of where it is, where it gives one
    reason: str | None = None  # why not all can be the same again

    def state_dict(self) -> dict[str, Any]:
        """The position as nested data; a checkpoint can hold it if it can hold the states of samplers."""
        fields = vars(self) | {"began": vars(self.began), "now": vars(self.now)}
        fields |= {name: [vars(state) for state in getattr(self, name)] for name in ("ahead", "carried")}
        return {"format": POSITION_FORMAT, **fields}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Position":
        """The position of a `state_dict`."""
        try:
            fields = dict(state)
            if fields.pop("format") != POSITION_FORMAT:
                raise ValueError("another format")
            for name in ("began", "now"):
                fields[name] = LoaderRngState(**fields[name])
            for name in ("ahead", "carried"):
                fields[name] = tuple(LoaderRngState(**state) for state in fields[name])
            return cls(**fields)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BadArgument(
                f"this is no position of a loader: {error!r}", fix="use the version of hotloop that wrote it"
            ) from error


@dataclass(frozen=True)
class Resumption:
    """What it took to go on from a position, and how exact it is."""

    skipped: int = 0  # batches that the training has had
    loaded: int = 0  # how many of them were loaded again
    reason: str | None = None  # why the rest may not be the same in everything; None: it is


@dataclass
class EpochProgress:
    """An epoch in progress: how it began, what was read of it, and whether all of it was."""

    began: LoaderRngState
    begun: bool  # whether workers that persist were there
    carried: tuple[LoaderRngState, ...]
    read: int = 0
    ended: bool = False
    is_mixed: bool = False  # whether it was begun with another number of workers
    latest: Any = None  # what was read last, while the epoch lasts
    states: deque[LoaderRngState] = field(
        default_factory=lambda: deque(maxlen=MOST_AHEAD)
    )  # before the latest were read

    def follow(self, batches: Iterator[T], get_state: Callable[[], LoaderRngState] | None) -> Iterator[T]:
        """The same batches, counted; with `get_state`, the rng state before each one is kept."""
        try:
            for batch in batches if get_state is None else self._watched(batches, get_state):
                self.read += 1
                self.latest = batch
                yield batch
            self.ended = True
        finally:
            self.latest = None  # a batch may take much memory

    def _watched(self, batches: Iterator[T], get_state: Callable[[], LoaderRngState]) -> Iterator[T]:
        state = get_state()
        for batch in batches:
            self.states.append(state)
            yield batch
            state = get_state()


class Skip:
    """Draws or batches that are dropped because the training has had them."""

    def __init__(self, count: int, *, watched: bool) -> None:
        self.count = count
        self.last: Any = None  # what was dropped last
        self.missing = 0  # how many there were too few
        self.after_first: LoaderRngState | None = None  # the rng states once the first was dropped
        self._watched = watched

    def __call__(self, batches: Iterator[Any], tell: Tell | None = None) -> None:
        self.missing = self.count
        for number, dropped in enumerate(islice(batches, self.count), 1):
            self.last, self.missing = dropped, self.count - number
            if number == 1 and self._watched:
                self.after_first = LoaderRngState.now()
            if tell is not None:
                tell(number, self.count)

    def disturbed(self, position: Position) -> bool:
        """Whether the loader draws while its epoch runs from what others have drawn from too."""
        if self.after_first is None:
            return False
        after = LoaderRngState.now()
        drew, others_drew = self.after_first.differs(after), position.now.differs(after)
        return any(mine and others for mine, others in zip(drew, others_drew, strict=True))


class Epochs(ABC, Generic[T]):
    """The epochs of a loader."""

    workers = 0
    prefetched = 0  # batches that workers are asked for in advance
    random_items = False  # whether an item may be another one each time it is made
    batches = 0  # that were read from the loader, in all epochs
    waited = 0.0  # seconds of this thread until they were there, starts of workers included
    batch_bytes = 0  # of the largest first batch of an epoch

    def __init__(self, rng: LoaderRng, *, state_of_each: bool = False) -> None:
        self.first = 0  # number of the first batch of the epoch in progress: above 0 in one that was resumed
        self._rng = rng
        self._get_state = rng.get_full_state if state_of_each else None
        self._epoch: EpochProgress | None = None
        self._ready: Iterator[T] | None = None  # an epoch that was begun at a position

    @abstractmethod
    def _open(self) -> Iterator[T]:
        """Make the iterator of the next epoch, as the loader does."""

    @abstractmethod
    def _open_at(self, position: Position, skip: Skip, tell: Tell | None) -> tuple[Iterator[T], int]:
        """Make the iterator and skip what the training has had; also, how many batches that loaded again."""

    @abstractmethod
    def _has_begun(self) -> bool:
        """Whether workers that persist between epochs are there already."""

    def _restart(self, position: Position) -> None:
        """Let workers that persist be there, or not, as they were when the epoch of a position began."""

    def _carried(self) -> tuple[LoaderRngState, ...]:
        """The rng states of workers that persist, where they are known."""
        return ()

    def _why_never(self) -> str | None:
        """Why no epoch of this loader can be begun again exactly."""
        return None

    def _own_account(self) -> Any:
        """What the loader itself tells of where it is."""
        return None

    def begin(self) -> Iterator[T]:
        """The next epoch."""
        if self._ready is not None:
            ready, self._ready = self._ready, None
            return ready
        self.first = 0
        epoch = EpochProgress(self._rng.get_state(), self._has_begun(), self._carried())
        batches = self._open()
        self._epoch = epoch
        return epoch.follow(batches, self._get_state)

    def latest(self, consumed: int) -> Any:
        """What was read last, where the training has had so many batches and nothing was read after them."""
        return None if self._epoch is None or self._epoch.read != consumed else self._epoch.latest

    def position(self, consumed: int | None, last: tuple[int, ...] | None) -> Position:
        """Where the epoch in progress is when the training has had so many of its batches; None: between epochs."""
        now = self._rng.get_full_state()
        if consumed is None:
            began, begun, carried = self._rng.get_state(), self._has_begun(), self._carried()
            reason = self._why_not_the_same(begun, carried)
            return Position(None, began, now, begun=begun, carried=carried, workers=self.workers, reason=reason)
        epoch = self._epoch
        read = 0 if epoch is None else epoch.read
        if epoch is None or not 0 <= consumed <= read:
            raise BadArgument(
                f"consumed={consumed}, but {read} batches of the epoch were read",
                fix="give the number of batches of this epoch that were trained on",
            )
        ahead = read - consumed
        states = list(epoch.states)[len(epoch.states) - ahead :] if ahead <= len(epoch.states) else []
        unnoted = ahead > len(states) and consumed > 0 and self.workers == 0
        return Position(
            consumed=consumed,
            began=epoch.began,
            now=now,
            read=read,
            ended=epoch.ended,
            ahead=tuple(states),
            last=last,
            begun=epoch.begun,
            workers=self.workers,
            prefetched=self.prefetched,
            carried=epoch.carried,
            loader=None if ahead or epoch.ended else self._own_account(),
            reason=self._why_not_the_same(epoch.begun, epoch.carried, unnoted=unnoted, mixed=epoch.is_mixed),
        )

    def _why_not_the_same(
        self, begun: bool, carried: tuple[LoaderRngState, ...], *, unnoted: bool = False, mixed: bool = False
    ) -> str | None:
        if why := self._why_never():
            return why
        if not self.random_items:
            return None
        if unnoted:
            return "a batch was read and not trained on; its items are the same, randomness in them is not"
        if mixed:
            return (
                "the number of workers was changed during the epoch: the order of the items is the same, what is "
                "random in them is not"
            )
        if begun and not carried:
            return (
                "workers that persist carry their rng states from epoch to epoch, and those are not known here: the "
                "order of the items is the same, randomness in them is not (persistent_workers=False keeps both)"
            )
        return None

    def resume(self, position: Position, tell: Tell | None = None) -> Resumption:
        """Make the next epoch resume from a position; the caller then restores the global rng states.

        `tell` is called for each batch that has to be loaded again, with how many those are so far and in all.
        """
        reasons = [position.reason, self._what_changed(position)]
        self._restart(position)
        self._epoch = self._ready = None
        if position.consumed is None:
            self._rng.set_own_state(position.began)
            return Resumption(reason=_joined(reasons))
        self._rng.set_state(position.began)
        skip = Skip(position.consumed, watched=not self._rng.in_torch_alone)
        batches, loaded = self._open_at(position, skip, tell)
        self._epoch = epoch = EpochProgress(position.began, position.begun, position.carried, position.consumed)
        epoch.is_mixed = self.workers != position.workers
        self.first = position.consumed
        rest = epoch.follow(batches, self._get_state)
        ahead = self._read_again(rest, position)
        if position.ended:
            ahead += rest  # a loader that has said that it is at its end has drawn all that it draws
        reasons.append(_why_other(position, skip))
        if self.prefetched == position.prefetched:
            self._rng.set_own_state(position.now)
        self._ready = chain(ahead, rest)
        return Resumption(position.consumed, loaded, _joined(reasons))

    def _read_again(self, rest: Iterator[T], position: Position) -> list[T]:
        """The batches that were read ahead of the training, read with the rng states of then."""
        assert position.consumed is not None
        if not position.ahead:
            return list(islice(rest, position.read - position.consumed))
        again: list[T] = []
        for state in position.ahead:
            self._rng.set_state(state)
            again += islice(rest, 1)
        return again

    def _what_changed(self, position: Position) -> str | None:
        if not self._rng.fits(position.began):
            return "the loader has more or fewer generators than it had: its order may be another one"
        if self.random_items and self.workers != position.workers:
            return (
                f"the loader had num_workers={position.workers} and has {self.workers} now: "
                "the order of the items is the same, randomness in them is not"
            )
        return None


def _why_other(position: Position, skip: Skip) -> str | None:
    """What the skipped batches tell about whether the loader is the one that it was."""
    if skip.missing:
        few = plural(skip.missing, "batch", "batches")
        return f"the loader has {few} too few: its dataset, sampler or batch size has changed"
    drawn = BatchOrigin(0, skip.last).indices
    if position.last is not None and drawn is not None and drawn != position.last:
        return (
            "the last batch before the checkpoint would hold other items now: the dataset, sampler or batch size has "
            "changed, or the sampler shares its rng state with other code"
        )
    if skip.disturbed(position):
        return (
            "the loader draws random numbers during the epoch from an rng state that other code uses too: "
            "later batches may differ (give the loader its own generator)"
        )
    return None


def _joined(reasons: list[str | None]) -> str | None:
    return "; ".join(dict.fromkeys(reason for reason in reasons if reason)) or None
