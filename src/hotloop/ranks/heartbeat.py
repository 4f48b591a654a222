"""`Heartbeat`: every few seconds each rank tells the others where it is; where one is lost, they say which and where.

A thread looks at the stack of the training thread and writes a `Word` to the store of the process group. A step knows
nothing of it. The first rank of each host also writes the words that it knows to a file, which `hotloop top` reads.
"""

import json
import os
import re
import secrets
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist

from hotloop._torch import store_of_ranks
from hotloop.errors import BadArgument, HotloopError
from hotloop.files.cache import cache_folder, make_private, why_foreign
from hotloop.files.whole import finite
from hotloop.placement.sites import OURS, is_installed, short
from hotloop.printing.text import duration, plural, printable
from hotloop.ranks.group import Ranks, RanksDiffer, timeout

PERIOD = 2.0  # seconds between two words of a rank
PATIENCE = 2 * PERIOD + 1.0  # seconds for a rank to say a word; one that says none in that time is lost
LATE = 30.0  # seconds of waiting, after which it is said who is late; HOTLOOP_RANK_LATE says otherwise
MANY = 32  # ranks; more of them do not all read the words of all, every few seconds
LOST = ("gone", "stopped")  # what became of a process that takes part no more
NAMED = 4  # ranks that a message names
FOLDER = "ranks"  # of the cache, with a file for each run and host
OLD = 86400.0  # seconds after which a file of a run that was killed is removed
WAITING = (  # modules in which a rank waits for others; in the backward pass it does while DDP exchanges gradients
    *("torch.distributed", "torch.nn.parallel.distributed", "torch.autograd.graph"),
    *("hotloop.ranks.group", "hotloop.step.across"),
)
# Errors of gloo have no type of their own; those inside a backward pass are known by their words alone.
GLOO = re.compile(r"\bgloo(/|::)|\bpair closure\b|ddp_comm_hooks|connection (closed|reset) by peer", re.IGNORECASE)
COLLECTIVES = (
    "torch.distributed.distributed_c10d",
    "hotloop.ranks.group",
    "hotloop.step.across",
)  # their errors are so too
# What stands before the words of an error: where in PyTorch's sources it was raised.
WHERE = re.compile(r"^(Got the following error when running the callback: \w+: )?(\[?\S+\.(cc|cpp|h|hpp):\d+\]\s*)?")
TRAINING, READING = "the training step", "the wait for a batch"  # what a rank does
EVALUATION, SAVING = "the evaluation", "the saving of a checkpoint"
BEGINNING, BETWEEN = "the beginning of fit", "the work between two epochs"
ELSEWHERE = "code of its own"  # where nothing else is known
RESUME = (
    "with save= and resume=True the run goes on from its last checkpoint; `hotloop launch --max-restarts 3`"
    " (torchrun --max-restarts=3) starts all ranks again by itself"
)


class RankLost(HotloopError):
    """Another rank died, hangs or does something else, so that this one cannot go on."""


class RankWarning(UserWarning):
    """Ranks have waited for others for a long time."""


class Progress(NamedTuple):
    """How far a rank is: updates of the weights, the epoch, and the batch of it that is in work."""

    step: int = 0
    epoch: int = 0
    batch: int = 0


class CodePlace(NamedTuple):
    """Where a rank is in its code."""

    phase: str
    line: str
    waits: bool  # for other ranks


class Speed(NamedTuple):
    """How fast a rank is: items a second, and the median seconds of its updates, its own and those of waiting."""

    items: float | None = None
    own: float | None = None
    waited: float | None = None


@dataclass(frozen=True)
class Word:
    """What a rank says of itself."""

    rank: int
    host: str
    pid: int
    began: float | None  # when its process did: numbers of processes come again
    space: str  # the host and the namespace in which this number is known
    number: int  # words so far
    when: float  # by its clock
    since: float  # when it came to where it is
    progress: Progress
    place: CodePlace
    ended: str = ""  # how: "done", "failed", "lost", "apart"
    said: str = ""  # why
    device: str = ""
    speed: Speed = field(default_factory=Speed)

    def __str__(self) -> str:
        step, epoch, batch = self.progress
        if self.ended == "done":
            return f"its last fit or evaluation, after step {step}"
        number = f" of batch {batch - 1} of epoch {epoch}" if batch and self.place.phase == TRAINING else ""
        waits = ", waiting for other ranks" if self.place.waits else ""
        line = f", at {self.place.line}" if self.place.line else ""
        return f"{self.place.phase}{number} after step {step}{line}{waits}"

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {printable(self.host)}"

    @property
    def age(self) -> str:
        return _length(time.time() - self.when)

    def process(self) -> str:
        """What became of the process, where this one can see it: "runs", "stopped", "gone"; else nothing."""
        if self.space != _space():
            return ""
        try:
            process = psutil.Process(self.pid)
            if self.began is not None and abs(process.create_time() - self.began) > 1.0:
                return "gone"
            status = process.status()
        except psutil.NoSuchProcess:
            return "gone"
        except psutil.Error:
            return ""
        names = {psutil.STATUS_ZOMBIE: "gone", psutil.STATUS_DEAD: "gone", psutil.STATUS_STOPPED: "stopped"}
        return names.get(status, "runs")

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, data: bytes) -> "Word":
        fields = json.loads(data)
        kinds = {"place": CodePlace, "progress": Progress, "speed": Speed}
        return cls(**fields | {name: kind(*fields[name]) for name, kind in kinds.items()})


class Heartbeat:
    """This rank's words and those of the others, inside `with`; what fails there because of them becomes `RankLost`.

    `phases` names what a rank does while it is in a function; `progress` tells how far it is, `items` how many it has
    trained on, and `paces` the seconds of an update, its own and those of waiting, for which the device may be asked.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.phases: Mapping[CodeType, str] = {}
        self.progress: Callable[[], Progress] = Progress
        self.items: Callable[[], int] = int
        self.paces: Callable[[], tuple[float, float] | None] = lambda: None
        self._depth = 0
        self._store: Any = None
        self._lock = threading.Lock()  # of what this rank has said
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = 0  # the thread that trains
        self._said: Word | None = None
        self._known: dict[int, Word] = {}  # what others have said last
        self._has_warned = False
        self._rate, self._pace = _Rate(), _Answer(lambda: self.paces())  # noqa: PLW0108  # whichever it is then
        self._speed = Speed()
        self._file = _RunFile()

    def __enter__(self) -> None:
        if not self._depth:
            self._late = _late()
        self._depth += 1
        if self._depth > 1:
            return
        if self._store is None:
            self._store = store_of_ranks(PERIOD)
        self._main = threading.get_ident()
        self._said = None
        self._has_warned = False
        self._stop = threading.Event()
        if self._store is not None:
            self._say(self._place(_stack(sys._getframe(1))))
            self._thread = threading.Thread(target=self._beat, name="hotloop-heartbeat", daemon=True)
            self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        lost = self.lost(error) if error is not None else None
        self._depth -= 1
        if not self._depth:
            self._stop.set()
            if self._thread is not None:
                self._thread.join(PERIOD)
                self._thread = None
            self._pace.rest()
            self._file.remove()
            self._end(None if isinstance(error, GeneratorExit) else error)
        if lost is not None:
            raise lost from error

    def _end(self, error: BaseException | None) -> None:
        """Say the last word, and leave the others the time to hear it where their store ends with this process."""
        if self._said is not None and self._said.ended:
            pass  # it is said
        elif error is None:
            self._say(CodePlace(ELSEWHERE, "", waits=False), ended="done")
        else:
            words = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
            self._say(self._place_of(error), ended="failed", said=printable(words)[:200])
        holds = self._ranks.is_first and _first_holds_the_store()
        if holds and self._store is not None and isinstance(error, Exception) and not isinstance(error, RanksDiffer):
            time.sleep(PERIOD + 0.5)

    # What this rank says

    def _beat(self) -> None:
        """Runs in its thread: say where the training thread is, and who is late if it waits for long."""
        while self._store is not None and not self._stop.wait(PERIOD):
            with suppress(Exception):  # whatever is wrong here must not be felt by the training
                self._look()
            with suppress(Exception):
                self._tell_top()

    def _look(self) -> None:
        before = self._said
        self._speed = Speed(self._rate.see(time.monotonic(), self.items()), *(self._pace.latest() or (None, None)))
        place = self._place(_stack(sys._current_frames().get(self._main)))
        now = self._say(place, is_last=False)
        if _first_holds_the_store():
            self._read([0])  # which takes the words of all with it when it ends
        if now is None or not place.waits or before is None or now.since != before.since:
            return
        waited = now.when - now.since
        self.hear()
        if waited >= self._late and not self._has_warned:
            self._has_warned = True
            self._tell_who_is_late(now, waited)

    def _say(self, place: CodePlace, *, is_last: bool = True, ended: str = "", said: str = "") -> Word | None:
        """Write a word; after one that is about the end of this rank, none."""
        with self._lock:
            before, now, progress = self._said, time.time(), self.progress()
            if before is not None and before.ended and not is_last:
                return None
            since = now
            if before is not None and (before.progress, before.place[::2]) == (progress, place[::2]):
                since = before.since  # it is on another line at most
            self._said = word = Word(
                rank=self._ranks.rank,
                host=self._ranks.host,
                pid=os.getpid(),
                began=_began(),
                space=_space(),
                number=next(_numbers),
                when=now,
                since=since,
                progress=progress,
                place=place,
                ended=ended,
                said=said,
                device=str(self._ranks.device),
                speed=self._speed,
            )
            self._write(_key(word.rank), word.encoded())
            return word

    def _tell_top(self) -> None:
        """On the first rank of a host: write what is known of all ranks; of very many, those of this host."""
        ranks, mine = self._ranks, self._said
        if ranks.local_rank or mine is None or self._stop.is_set():
            return
        here = range(ranks.rank, min(ranks.rank + _number_here(), ranks.rank + MANY, ranks.size))
        shown = range(ranks.size) if ranks.size <= MANY else here
        self._read({0, *shown})
        words = {**self._known, ranks.rank: mine}
        first = words.get(0, mine)
        self._file.write(
            {
                "run": f"{first.host} {first.pid}",
                "program": Path(sys.argv[0]).name[:200] if sys.argv else "",
                "ranks": ranks.size,
                "words": [_for_top(words[rank]) for rank in shown if rank in words],
            }
        )

    def _place_of(self, error: BaseException) -> CodePlace:
        """Where an error was raised."""
        inside = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        return self._place([*reversed(inside), *_stack(sys._getframe(1))])

    def _place(self, stack: Iterable[tuple[FrameType, int]]) -> CodePlace:
        """What a stack tells, innermost frame first."""
        stack = list(stack)
        phase = next((self.phases[f.f_code] for f, _ in stack if f.f_code in self.phases), ELSEWHERE)
        outside = [(f, line) for f, line in stack if not f.f_code.co_filename.startswith(OURS)]
        users = [(f, line) for f, line in outside if not is_installed(f.f_code.co_filename)]
        line = next((f"{short(f.f_code.co_filename)}:{n} in {f.f_code.co_name}" for f, n in users or outside), "")
        module = str(stack[0][0].f_globals.get("__name__", "")) if stack else ""
        return CodePlace(phase, line, module.startswith(WAITING))

    # The store, which ends with the process that holds it

    def _write(self, key: str, value: bytes) -> None:
        store = self._store  # which the other thread may give up
        if store is not None:
            try:
                store.set(key, value)
            except (RuntimeError, OSError):
                self._store = None

    def _read(self, ranks: Iterable[int]) -> None:
        """Hear what others have said last; nothing new where the store is gone."""
        store, others = self._store, [rank for rank in ranks if rank != self._ranks.rank]
        try:
            if store is None or not others:
                return
            if not store.check([_key(rank) for rank in others]):
                others = [rank for rank in others if store.check([_key(rank)])]
            words = store.multi_get([_key(rank) for rank in others]) if others else []
        except (RuntimeError, OSError):
            self._store = None
            return
        self._known.update({word.rank: word for word in map(Word.decoded, words)})

    def hear(self) -> None:
        """Take in what others have said: where the store ends with one of them, that is all that will be known."""
        self._read(range(self._ranks.size if self._ranks.size <= MANY else 1))

    # Words for a person

    def lost(self, error: BaseException) -> RankLost | None:
        """Words for a collective that failed: which rank is lost, and where; None for any other error."""
        if not is_of_collective(error):
            return None
        if self._store is None and not self._depth:  # a step in a loop of the person's own, over their own batches
            self._store = store_of_ranks(PERIOD)
        mine = self._say(self._place_of(error), ended="lost")
        assert mine is not None
        is_fresh = self._inquire()
        what, fix = self._verdict(mine, is_fresh)
        self._say(mine.place, ended="lost", said=what)
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = printable(WHERE.sub("", first).partition(" This is typically")[0])[:200]
        here = f"{self._ranks} was in {replace(mine, place=mine.place._replace(waits=False))}"
        return RankLost(f"{what}\n  {here}, and its collective failed: {reason}", fix=fix)

    def _inquire(self) -> set[int]:
        """Wait until it is known of each rank whether it still says something; the ranks that do."""
        others = set(range(self._ranks.size)) - {self._ranks.rank}
        fresh: set[int] = set()

        def ask() -> None:
            self._read(others)
            before = {rank: word.number for rank, word in self._known.items()}
            open_questions = set(others)
            while self._store is not None and time.monotonic() < end:
                for rank in list(open_questions):
                    word = self._known.get(rank)
                    if word is not None and word.number > before.get(rank, -1):
                        fresh.add(rank)
                    if word is not None and (rank in fresh or word.ended or word.process() in LOST):
                        open_questions.discard(rank)
                if not open_questions:
                    return
                time.sleep(0.1)
                self._read(open_questions)

        end = time.monotonic() + PATIENCE
        asking = threading.Thread(target=ask, daemon=True)  # a store that hangs must not hold up the error
        asking.start()
        asking.join(PATIENCE + PERIOD)
        return set(fresh)

    def _verdict(self, mine: Word, fresh: set[int]) -> tuple[str, str]:
        """Which ranks are to blame, in words, and what to do."""
        others = [rank for rank in range(self._ranks.size) if rank != mine.rank]
        words = {rank: self._known[rank] for rank in others if rank in self._known}
        for word in words.values():
            if word.ended == "apart":
                return word.said, _APART
        if failed := [f"{w.name} ended with {w.said}, in {w}" for w in words.values() if w.ended == "failed"]:
            return _several(failed), f"see the error of that rank; {RESUME}"
        if dead := [fate for rank in others if (fate := self._fate(rank, words.get(rank), fresh))]:
            return _several(dead), f"see what that rank printed last; {RESUME}"
        if busy := [w for w in words.values() if not w.ended and not w.place.waits and w.when - w.since >= PERIOD]:
            late = [f"{w.name} is late: it has been in {w} for {_length(w.when - w.since)}" for w in busy]
            longer = "HOTLOOP_RANK_TIMEOUT=3600 lets the others wait for an hour"
            return _several(late), f"look at what it does there; {longer}; {RESUME}"
        if apart := [word for word in words.values() if _differ(mine, word)]:
            return self._apart(mine, apart), f"{_TOGETHER}; {_APART}"
        for word in words.values():
            if word.ended == "lost" and word.said and not word.said.startswith(f"rank {mine.rank} on "):
                return f"{word.name} says: {word.said}", RESUME
        if not words:
            return "another rank is lost, and nothing is known of it", f"see what the others printed last; {RESUME}"
        return (
            "the connection between ranks broke, and none of them is known to have ended",
            f"look at the network between {_several(sorted({w.host for w in [mine, *words.values()]}))}; {RESUME}",
        )

    def _fate(self, rank: int, word: Word | None, fresh: set[int]) -> str:
        """How a rank was lost, in words; nothing for one that was not."""
        if word is None:
            return f"rank {rank} has said nothing" if self._store is not None else ""
        process = word.process()
        if word.ended and not (word.ended == "done" and (process == "gone" or self._store is None)):
            return ""
        last = f"its last word, {word.age} ago, came from {word}"
        if process == "gone":
            return f"{word.name} is gone: its process {word.pid} no longer runs; {last}"
        if process == "stopped":
            return f"{word.name} is stopped: its process {word.pid} gets no time (SIGSTOP, a debugger); {last}"
        if self._store is None and process:
            return ""  # it runs here, and has nothing to say it with
        if self._store is None:
            return f"{word.name} cannot be reached, and nor can the store over which ranks talk; {last}"
        if rank not in fresh:
            return f"{word.name} no longer answers: it died, hangs or cannot be reached; {last}"
        return ""

    def _apart(self, mine: Word, others: Iterable[Word]) -> str:
        each = _several([f"{w.name} {'is in' if w.ended != 'done' else 'has gone on after'} {w}" for w in others])
        return f"ranks do different things: rank {mine.rank} is in {mine}, but {each}"

    def _tell_who_is_late(self, mine: Word, waited: float) -> None:
        """Warn in the first of the ranks that wait."""
        self._read(range(self._ranks.size))
        late, waiting = [], [mine.rank]
        for word in self._known.values():
            is_silent = mine.when - word.when > PATIENCE
            if word.place.waits and not is_silent and not word.ended and not _differ(mine, word):
                waiting.append(word.rank)
            elif is_silent:
                late.append(f"{word.name}, silent for {word.age}, last in {word}")
            else:
                late.append(f"{word.name}, in {word}")
        if min(waiting) != mine.rank or not late:
            return
        file, _, line = mine.place.line.partition(" in ")[0].rpartition(":")
        most = f"it waits for {_length(_seconds())} at most"
        words = f"{self._ranks} has waited {_length(waited)} for {_several(late)}; {most}"
        warnings.warn_explicit(words, RankWarning, file or "hotloop", int(line or 0))

    # The end of an epoch of unknown length

    def meet(self, epoch: int, batches: int) -> None:
        """After an epoch whose length nobody knew: refuse to go on where another rank has more batches of it.

        Its next collective would meet another one of this rank, which ends processes, or adds up what does not belong
        together.
        """
        store = self._store
        if store is None:
            return
        number = next(_meetings)
        keys = [f"hotloop/meeting {number} of rank {rank}" for rank in range(self._ranks.size)]
        end, pause = time.monotonic() + _seconds(), 0.001
        self._say(CodePlace(BETWEEN, "", waits=False), is_last=False)
        store.set(keys[self._ranks.rank], str(batches))
        missing = set(range(self._ranks.size)) - {self._ranks.rank}
        while missing := {rank for rank in missing if not store.check([keys[rank]])}:
            if time.monotonic() > end:
                raise dist.DistStoreError(f"no word from {plural(len(missing), 'rank')} after the epoch")
            time.sleep(pause)
            pause = min(2 * pause, PERIOD)
            if pause < PERIOD:
                continue
            self._read(missing)
            words = [self._known[rank] for rank in sorted(missing) if rank in self._known]
            if any(word.ended in ("failed", "lost") or word.process() in LOST for word in words):
                raise dist.DistStoreError("another rank has ended in the epoch")
            if more := [w for w in words if w.progress.epoch == epoch and w.progress.batch > batches]:
                mine = f"{self._ranks} had {plural(batches, 'batch', 'batches')} in epoch {epoch}"
                others = _several([f"{word.name} is in {word}" for word in more])
                self._must_not_go_on(f"ranks have different numbers of batches: {mine}, but {others}")
        numbers = [int(each) for each in store.multi_get(keys)]
        if len(set(numbers)) > 1:
            each = _several([f"rank {rank} had {number}" for rank, number in enumerate(numbers)])
            self._must_not_go_on(f"ranks have different numbers of batches in epoch {epoch}: {each}")

    def _must_not_go_on(self, what: str) -> None:
        self._say(CodePlace(BETWEEN, "", waits=False), ended="apart", said=what)
        raise RankLost(what, fix=_APART)


class _Rate:
    """Items a second of late, from a count that is looked at from time to time."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=6)  # when it was another number than before

    def see(self, now: float, items: int) -> float | None:
        """The rate; None where it is not known yet, and where the count has not changed for long."""
        if not self._seen or items != self._seen[-1][1]:
            self._seen.append((now, items))
        (start, before), (last, count) = self._seen[0], self._seen[-1]
        longest = 3 * max((last - start) / max(len(self._seen) - 1, 1), 2 * PERIOD)
        return (count - before) / (last - start) if last > start and now - last <= longest else None


class _Answer:
    """The last answer to a question that is asked in a thread of its own: a GPU that hangs may never answer."""

    def __init__(self, ask: Callable[[], tuple[float, float] | None]) -> None:
        self._ask = ask
        self._value: tuple[float, float] | None = None
        self._thread: threading.Thread | None = None

    def latest(self) -> tuple[float, float] | None:
        """What was answered before; it is asked again meanwhile."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="hotloop-pace", daemon=True)
            self._thread.start()
        return self._value

    def rest(self) -> None:
        """Ask nothing any more; an answer that is on its way is waited for, but not for long."""
        if self._thread is not None:
            self._thread.join(PERIOD)

    def _work(self) -> None:
        with suppress(RuntimeError):  # another update was timed meanwhile, or the device has failed
            self._value = self._ask()


class _RunFile:
    """What ranks say of themselves, in a file of this person alone; it is there while a run is."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def write(self, data: dict[str, Any]) -> None:
        if self._path is None:
            folder = cache_folder(FOLDER)
            make_private(folder)
            path = folder / f"{os.getpid()}-{secrets.token_hex(4)}.json"
            if why_foreign(path) is not None:
                return
            self._path = path
            _remove_old(folder)
        temporary = self._path.with_suffix(".new")
        with open(temporary, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
            json.dump(finite(data), file, allow_nan=False)
        temporary.replace(self._path)

    def remove(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _remove_old(folder: Path) -> None:
    """Remove what runs have left that were killed."""
    for path in [*folder.iterdir()][:1000]:
        with suppress(OSError):
            if path.suffix in (".json", ".new") and time.time() - path.stat().st_mtime > OLD:
                path.unlink()


def _for_top(word: Word) -> dict[str, Any]:
    step, epoch, _ = word.progress
    return {
        "rank": word.rank,
        "host": word.host[:200],
        "device": word.device[:40],
        "pid": word.pid,
        "time": word.when,
        "step": step,
        "epoch": epoch,
        "phase": word.place.phase,
        "line": word.place.line[:200],
        "waits": word.place.waits,
        "items_per_second": word.speed.items,
        "own": word.speed.own,
        "waited": word.speed.waited,
    }


def _number_here() -> int:
    """Processes of the run on this host."""
    words = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(words) if words.isdecimal() and len(words) < 6 else 1


_numbers, _meetings = count(), count()  # of all loops of this process

_TOGETHER = "call fit and evaluate on all ranks, not only on rank 0"
_APART = (
    "give every rank as many batches, or a loader with a length; without `is_sharded`, hotloop deals out the batches of"
    " one loader so that no rank has more than another"
)


def is_of_collective(error: BaseException) -> bool:
    """Whether an error came from what ranks do together."""
    if isinstance(error, dist.DistError):
        return True
    if type(error) is not RuntimeError:
        return False
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
    return module in COLLECTIVES or GLOO.search(str(error)) is not None


def _differ(mine: Word, other: Word) -> bool:
    """Whether two ranks are not in one and the same step, evaluation or saving."""
    places = [TRAINING if word.place.phase == READING else word.place.phase for word in (mine, other)]
    return other.ended == "done" or places[0] != places[1] or abs(mine.progress.step - other.progress.step) > 1


def _stack(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    return traceback.walk_stack(frame) if frame is not None else iter(())


def _several(words: list[str]) -> str:
    more = len(words) - NAMED
    return "; ".join([*words[:NAMED], *([f"and {more} more"] if more > 0 else [])])


def _length(seconds: float) -> str:
    return f"{max(seconds, 0.0):.0f} s" if seconds < 60 else duration(seconds)


def _first_holds_the_store() -> bool:
    """Else torchrun's own process does, which outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _key(rank: int) -> str:
    return f"hotloop/rank {rank}"


@cache
def _space() -> str:
    with suppress(OSError):
        return f"{os.uname().nodename} {Path('/proc/self/ns/pid').readlink()}"
    return f"process {os.getpid()}"  # which is seen by no other


@cache
def _began() -> float | None:
    with suppress(psutil.Error, OSError):
        return psutil.Process().create_time()
    return None


def _seconds() -> float:
    return timeout().total_seconds()


def _late() -> float:
    words = os.environ.get("HOTLOOP_RANK_LATE", "")
    try:
        return float(words) if words else LATE
    except ValueError as error:
        raise BadArgument(
            f"HOTLOOP_RANK_LATE={printable(words)!r} is no number of seconds", fix="give seconds, such as 30"
        ) from error
