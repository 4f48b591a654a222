"""`Writer`: checkpoints that are written in the background, from copies, while training goes on."""

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from hotloop.checkpoint.codec import Packed, pack
from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.checkpoint.host_copies import Snapshots
from hotloop.checkpoint.shards import Team, received, write_shard
from hotloop.checkpoint.store import Store, as_score
from hotloop.checkpoint.tensorfile import Source
from hotloop.errors import BadArgument, HotloopError, OutputError
from hotloop.printing.text import printable

_SHARED = "give a folder that all ranks can write to, on a disk that their hosts share"


class Writer:
    """Saves into a store from a thread of its own, one checkpoint at a time.

        with Writer(Store("runs/sprites")) as writer:
            for batch in loader:
                ...
                writer.submit(step, {"model": model.state_dict()})

    The thread lives as long as a save takes and no longer. A program that ends waits for the last one.

    The ranks of a `team` all submit the same step. Each writes its rows of tensors that are sharded; the first writes
    everything else, waits for the others' files and gives the checkpoint its name.
    """

    def __init__(self, store: Store, team: Team | None = None) -> None:
        self.store, self.team = store, team
        self.problems: list[str] = []  # why checkpoints were not saved
        self.written: int | None = None  # the step of the last checkpoint that was saved
        self._snapshots = Snapshots()
        self._thread: threading.Thread | None = None
        self._done = threading.Event()  # the thread has written what it had to
        self._warned = False
        self._is_over = threading.Event()  # the run has failed: other ranks may never write their part

    def submit(self, step: int, tree: Any, score: float | None = None, *, wait: bool = False) -> bool:
        """Copy a tree as it is now and have it written; False where that was skipped or there was no memory for it.

        The device is not waited for. If the last one is still being written this one is skipped, unless `wait` is set.
        A tree that checkpoints cannot hold is an error here; what goes wrong later is kept in `problems`.
        """
        score = as_score(score)
        if self.team is not None:
            return self._submit_together(self.team, step, tree, score, wait=wait)
        if self.busy and not wait:
            return False
        self.wait()
        tensors, state = pack(tree)
        try:
            sources = self._snapshots.take(tensors)
        except (RuntimeError, MemoryError) as error:
            self._fail(error, "no memory for a copy")
            return False
        self._start(step, partial(self.store.write, step, sources, state, score=score))
        return True

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if (thread := self._thread) is not None and thread is not threading.current_thread():
            # Not `join` at once: before 3.13 one that Ctrl-C interrupts takes the thread for dead, and a program that
            # ends would no longer wait for it.
            self._done.wait()
            thread.join()

    def close(self, *, failed: bool = False) -> None:
        """Wait for the last checkpoint, and free the memory that was kept for the next.

        After a run that has `failed`, ranks that write nothing more are not waited for.
        """
        if failed:
            self._is_over.set()
        self.wait()
        self._snapshots.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written now."""
        return self._thread is not None and self._thread.is_alive()

    def _submit_together(self, team: Team, step: int, tree: Any, score: float | None, *, wait: bool) -> bool:
        """The same on all ranks of a team: either all of them write, or none does."""
        with ExitStack() as stack:
            making: Path | None = None
            problem: Exception | None = None
            if team.is_first and (wait or not self.busy):
                self.wait()
                try:
                    making = stack.enter_context(self.store.begin(step))
                except HotloopError as error:
                    problem = error
            name = team.gather(None if making is None else making.name)[0]
            if name is None:
                if problem is not None:
                    self._fail(problem)
                return False
            folder = self.store.folder / name
            try:
                self.wait()
                if not folder.is_dir():
                    raise OutputError(f"{printable(str(self.store.folder))} is not the folder of rank 0", fix=_SHARED)
                packed = Packed(tree, takes_shards=True)
                whole = self._snapshots.take(packed.tensors) if team.is_first else []
                shards = self._snapshots.take(packed.shards)
            except (RuntimeError, MemoryError, HotloopError, OSError) as error:
                problem = error
            what = team.first_problem(None if problem is None else _words(problem))
            if isinstance(problem, BadArgument):
                raise problem
            if what is not None:
                self._fail(OutputError(f"cannot save the checkpoint of step {step}: {what}"))
                return False
            write = partial(write_shard, folder, team, shards, packed.starts)
            if team.is_first:
                write = partial(self._write_together, stack.pop_all(), folder, write, step, whole, packed.data, score)
            self._start(step, write)
            return True

    def _write_together(
        self,
        begun: ExitStack,
        making: Path,
        write: Callable[[], None],
        step: int,
        whole: Sequence[Source],
        state: Any,
        score: float | None,
    ) -> None:
        """On the first rank: write its own part, wait for those of the others, and put all of it in its place."""
        assert self.team is not None
        others = partial(received, making, self.team, self._is_over.is_set)
        with begun:
            write()
            self.store.finish(making, step, whole, state, score=score, others=others)

    def _start(self, step: int, write: Callable[[], object]) -> None:
        """Write in a thread, or here and now where none can be had or the interpreter would no longer wait for it."""
        thread = threading.Thread(target=self._write, args=(step, write), name="hotloop-checkpoint", daemon=False)
        try:
            if not threading.main_thread().is_alive():
                raise RuntimeError("the interpreter is ending")
            self._done.clear()
            thread.start()
        except RuntimeError:
            self._write(step, write)
        else:
            self._thread = thread

    def _write(self, step: int, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is not the training's fault
            self._fail(error, f"cannot save the checkpoint of step {step}")
        else:
            self.written = step
            self._warned = False
        finally:
            self._done.set()

    def _fail(self, error: Exception, doing: str = "") -> None:
        """Keep what went wrong, and say it once until a save succeeds again."""
        if isinstance(error, HotloopError):
            what, fix = error.what, error.fix
        else:
            what, fix = f"{doing}: {type(error).__name__}: {printable(str(error)[:300])}", None
        self.problems.append(what)
        if self._warned or (self.team is not None and not self.team.is_first):
            return
        self._warned = True
        stands = "none was saved before" if self.written is None else f"the one of step {self.written} is kept"
        advice = f"\n  fix: {fix}" if fix else ""
        with suppress(CheckpointWarning):  # warnings that are errors must not end the training either
            warnings.warn(
                CheckpointWarning(f"{what}; training continues, the next save tries again, and {stands}{advice}"),
                stacklevel=2,
            )


def _words(error: Exception) -> str:
    return error.what if isinstance(error, HotloopError) else f"{type(error).__name__}: {str(error)[:300]}"
