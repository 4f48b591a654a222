"""`Heartbeat`: every few seconds each rank tells the others how far it is; where one is lost, they say which and where.

A thread writes a `Beat` to the store of the process group and reads those of the others. A step does nothing for it.
"""

import json
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil

from hotloop._torch import store_of_ranks
from hotloop.errors import HotloopError
from hotloop.placement.sites import OURS, is_users, short
from hotloop.printing.text import duration, printable
from hotloop.ranks.group import Ranks, RanksDiffer, reason_of_collective, timeout

PERIOD = 2.0  # seconds between two beats of a rank
BEAT_PATIENCE = 2 * PERIOD + 1.0  # seconds for other ranks to beat, or to fail as well, after a collective has failed
LATE = 30.0  # seconds without progress, after which a warning names the ranks that are behind
MANY = 32  # ranks; of more, the others are read only when something fails
NAMED = 4  # ranks that a message names
RESUME = (
    "with save= and resume=True the run goes on from its last checkpoint; `hotloop launch --max-restarts 3`"
    " (torchrun --max-restarts=3) starts all ranks again by itself"
)
FIXES = {  # of what ranks are to blame for; the first that there is counts
    "failed": "see the error of that rank",
    "dead": "see what that rank printed last",
    "late": "look at what it does there; HOTLOOP_RANK_TIMEOUT=3600 lets the others wait for an hour",
}
Stack = Iterable[tuple[FrameType, int]]  # frames and lines, innermost first


class RankLost(HotloopError):
    """Another rank died, hangs or does something else, so that this one cannot go on."""


class RankWarning(UserWarning):
    """Ranks have waited for others for a long time."""


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    rank: int
    host: str
    pid: int
    space: str  # the host and the namespace in which `pid` is known
    time: float  # by its clock
    since: float  # when it got this far
    progress: list[int]  # updates of the weights, the epoch, and the batches that it has had of it
    line: str  # of the person's code
    ended: str = ""  # how: "done", "lost" where its collective failed, or its error

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {printable(self.host)}"

    def __str__(self) -> str:
        step, epoch, batch = self.progress
        where = f"batch {batch - 1} of epoch {epoch}" if batch else "code"
        where = "code behind its last fit or evaluation" if self.ended == "done" else where
        return f"{where} after step {step}" + (f", at {self.line}" if self.line else "")

    def end_of_process(self) -> str | None:
        """What became of the process, in words: nothing where it runs; None where it cannot be seen from here."""
        gone = f"is gone: its process {self.pid} no longer runs"
        try:
            status = psutil.Process(self.pid).status() if self.space == _space() else None
        except psutil.NoSuchProcess:
            return gone
        except psutil.Error:
            return None
        stopped = f"is stopped: its process {self.pid} gets no time (SIGSTOP, a debugger)"
        words = {psutil.STATUS_ZOMBIE: gone, psutil.STATUS_DEAD: gone, psutil.STATUS_STOPPED: stopped}
        return None if status is None else words.get(status, "")


class Heartbeat:
    """The beats of this rank and of the others, inside `with`; what fails there because of them becomes `RankLost`.

    `progress` says how far the rank is, as a `Beat` has it; `show` is given each beat.
    """

    def __init__(
        self,
        ranks: Ranks,
        progress: Callable[[], list[int]] = lambda: [0, 0, 0],
        show: Callable[[Beat], None] = lambda beat: None,
    ) -> None:
        self._ranks, self._progress, self._show = ranks, progress, show
        self.store: Any = None  # which ends with the process that holds it; None from then on
        self.known: dict[int, Beat] = {}  # the last beats of others
        self._is_warned = False  # of ranks that are late
        self._depth = 0
        self._lock = threading.Lock()  # of what this rank says
        self._mine: Beat | None = None

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self.store = self.store or store_of_ranks(PERIOD)
            self._mine, self._stop = None, threading.Event()
            self._tell(traceback.walk_stack(sys._getframe(1)))
            thread = threading.get_ident()
            self._thread = threading.Thread(target=self._run, args=[thread], name="hotloop-heartbeat", daemon=True)
            self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        lost = None if error is None else self.lost(error)
        self._depth -= 1
        if not self._depth:
            self._stop.set()
            self._thread.join(PERIOD)
            self._end(None if isinstance(error, GeneratorExit) else error)
        if lost is not None:
            raise lost from error

    def _run(self, thread: int) -> None:
        """Tell and hear, until the work is done; whatever is wrong here must not be felt by the training."""
        while not self._stop.wait(PERIOD):
            with suppress(Exception):
                mine = self._tell(traceback.walk_stack(sys._current_frames()[thread]))
                self.hear()
                self._warn(mine)
                self._show(mine)

    def _tell(self, stack: Stack, ended: str = "") -> Beat:
        """Say where this rank is; nothing more once it has said how it ended."""
        with self._lock:
            before, now, progress, ranks = self._mine, time.time(), self._progress(), self._ranks
            if before is not None and before.ended and not ended:
                return before
            since = before.since if before is not None and before.progress == progress else now
            place = (now, since, progress, _line(stack))
            self._mine = beat = Beat(ranks.rank, ranks.host, os.getpid(), _space(), *place, ended)
            with suppress(RuntimeError, OSError, AttributeError):  # no store, or its process has ended
                self.store.set(_key(ranks.rank), json.dumps(asdict(beat)))
            return beat

    def _end(self, error: BaseException | None) -> None:
        """Say how it ended, and leave the others the time to hear it where their store ends with this process."""
        mine = self._mine
        if mine is None or not mine.ended:  # else it is said
            words = "done" if error is None else traceback.format_exception_only(error)[-1].strip().splitlines()[0]
            mine = self._tell(() if error is None else _stack(error), printable(words)[:400])
        self._show(mine)
        holds_store = self._ranks.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        if holds_store and self.store and isinstance(error, Exception) and not isinstance(error, RanksDiffer):
            time.sleep(PERIOD + 0.5)

    def hear(self, ranks: Iterable[int] | None = None) -> None:
        """Take in what others have said: where the store ends with one of them, that is all that will be known."""
        ranks = range(min(self._ranks.size, MANY)) if ranks is None else ranks
        try:
            keys = [_key(rank) for rank in ranks if rank != self._ranks.rank and self.store is not None]
            there = [key for key in keys if self.store.check([key])]
            beats = [Beat(**json.loads(each)) for each in (self.store.multi_get(there) if there else ())]
        except (RuntimeError, OSError):
            self.store = None
            return
        self.known.update({beat.rank: beat for beat in beats})

    def _warn(self, mine: Beat) -> None:
        """On the first rank, once: for whom the others have waited for long."""
        beats, waited = [mine, *self.known.values()], mine.time - mine.since
        furthest, silent = max(beat.progress for beat in beats), mine.time - BEAT_PATIENCE
        behind = [beat for beat in beats if not beat.ended and (beat.progress < furthest or beat.time < silent)]
        if self._ranks.is_first and behind and waited >= LATE and not self._is_warned:
            self._is_warned = True
            most = f"they wait for {_length(timeout().total_seconds())} at most"
            words = f"ranks have waited {_length(waited)} for {several([f'{beat.name}, in {beat}' for beat in behind])}"
            warnings.warn_explicit(f"{words}; {most}", RankWarning, "hotloop", 0)

    def lost(self, error: BaseException) -> RankLost | None:
        """Words for a collective that failed: which rank is lost, and where; None for any other error."""
        if (reason := reason_of_collective(error)) is None:
            return None
        if self.store is None and not self._depth:  # a step in a loop of the person's own, over their own batches
            self.store = store_of_ranks(PERIOD)
        mine, fresh = self._tell(_stack(error), "lost"), set[int]()
        asking = threading.Thread(target=self._ask, args=[fresh], daemon=True)  # a store that hangs holds nothing up
        asking.start()
        asking.join(BEAT_PATIENCE + PERIOD)
        what, fix = self._verdict(mine, fresh)
        here = f"{self._ranks} was in {mine}, and its collective failed: {printable(reason)[:200]}"
        return RankLost(f"{what}\n  {here}", fix=fix)

    def _ask(self, fresh: set[int]) -> None:
        """Wait until all others have ended as well or are known to be dead; note those that go on."""
        waited_for, end = set(range(self._ranks.size)) - {self._ranks.rank}, time.monotonic() + BEAT_PATIENCE
        self.hear(waited_for)
        before = dict(self.known)
        while waited_for and self.store is not None and time.monotonic() < end:
            fresh.update(rank for rank in before if self.known[rank].time != before[rank].time)
            waited_for -= {rank for rank, beat in self.known.items() if beat.ended or beat.end_of_process()}
            time.sleep(0.1)
            self.hear(waited_for)

    def _verdict(self, mine: Beat, fresh: set[int]) -> tuple[str, str]:
        """Which ranks are to blame, in words, and what to do."""
        others = [self.known[rank] for rank in sorted(self.known)]
        blamed = [self._blame(beat, is_fresh=beat.rank in fresh) for beat in others]
        for kind, fix in FIXES.items():
            if words := [each for why, each in blamed if why == kind]:
                return several(words), f"{fix}; {RESUME}"
        if apart := [f"{beat.name} is in {beat}" for beat in others if beat.line != mine.line]:
            what = f"ranks do different things: rank {mine.rank} is in {mine}, but {several(apart)}"
            return what, "call fit and evaluate on all ranks, not only on rank 0, and give all as many batches"
        if not others:
            return "another rank is lost, and nothing is known of it", f"see what the others printed last; {RESUME}"
        hosts = several(sorted({printable(beat.host) for beat in [mine, *others]}))
        what = "the connection between ranks broke, and none of them is known to have ended"
        return what, f"look at the network between {hosts}; {RESUME}"

    def _blame(self, beat: Beat, *, is_fresh: bool) -> tuple[str, str]:
        """The kind of `FIXES` and words for a rank that is lost; nothing for one that waits for others too."""
        process = beat.end_of_process()
        last = f"its last word, {_length(time.time() - beat.time)} ago, came from {beat}"
        if beat.ended not in ("", "done", "lost"):
            return "failed", f"{beat.name} ended with {beat.ended}, in {beat}"
        if beat.ended == "lost" or (beat.ended and not process):
            return "", ""
        if process:
            return "dead", f"{beat.name} {process}; {last}"
        if is_fresh:
            return "late", f"{beat.name} is late: for {_length(beat.time - beat.since)} it has been in {beat}"
        if self.store is None and process is not None:
            return "", ""  # it runs here, and has no store to say it with
        return "dead", f"{beat.name} no longer answers: it died, hangs or cannot be reached; {last}"


def _stack(error: BaseException) -> Stack:
    """Where an error was raised."""
    return [*reversed([*traceback.walk_tb(error.__traceback__)]), *traceback.walk_stack(sys._getframe(1))]


def _line(stack: Stack) -> str:
    """The innermost line of the person's code; where there is none, that of another library."""
    outside = [(frame, line) for frame, line in stack if not frame.f_code.co_filename.startswith(OURS)]
    found = [(frame, line) for frame, line in outside if is_users(frame)] or outside
    return next((f"{short(f.f_code.co_filename)}:{line} in {f.f_code.co_name}" for f, line in found), "")


def several(words: Sequence[str]) -> str:
    """The first few of what is said of ranks, and how many more there are."""
    more = len(words) - NAMED
    return "; ".join([*words[:NAMED], *([f"and {more} more"] if more > 0 else [])])


def _length(seconds: float) -> str:
    return f"{max(seconds, 0.0):.0f} s" if seconds < 60 else duration(seconds)


def _key(rank: int) -> str:
    return f"hotloop/rank {rank}"


def _space() -> str:
    with suppress(OSError):
        return f"{os.uname().nodename} {Path('/proc/self/ns/pid').readlink()}"
    return f"process {os.getpid()}"  # which is seen by no other
