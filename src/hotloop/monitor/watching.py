"""`Watching`: the hardware is looked at from a thread while something runs, and what it did is added up."""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

from hotloop.errors import BadArgument
from hotloop.monitor.host import Around
from hotloop.monitor.load import LoadTally
from hotloop.monitor.logs import EVERY, Logged, Logs
from hotloop.monitor.reading import Reading, scalars
from hotloop.records import Load

LAST_READING = 2.0  # seconds that the end waits for the last reading; a driver that hangs is left behind


def watch(
    every: float = EVERY,
    gpus: Collection[int | str] | None = None,
    log: Logged = None,
) -> "Watching":
    """Watch the hardware while a block runs.

        with hotloop.watch() as watching:
            train()
        print(watching.load.joules)

    `gpus` are those to tell of, by index or UUID: by default those that this program uses. `log` takes the numbers of
    every sample, as that of `fit` does: "tensorboard", "wandb", a path that ends in `.jsonl`, a `Log`, or a
    list of these.
    """
    return Watching(every=every, gpus=gpus, log=log)


class Watching:
    """Samples the hardware twice a second in a thread of its own, from `with` or `start()` to its end or `stop()`.

    What goes wrong in there is noted in the load and never reaches the training. A process that was forked off has no
    such thread, and none is started in it.
    """

    def __init__(
        self,
        read: Callable[[], Reading] | None = None,  # in place of a `Sampler`
        *,
        every: float = EVERY,
        gpus: Collection[int | str] | None = None,
        log: Logged = None,
        step: Callable[[], int] | None = None,  # of the training, for the log; without it, samples are counted
    ) -> None:
        if not 0 < every < threading.TIMEOUT_MAX:
            raise BadArgument(f"every={every}", fix="give the seconds between two samples, such as 0.5")
        self.every = every
        self.latest: Reading | None = None
        self._read = read
        self._gpus = gpus
        self._step = step
        self._logs = Logs(log)
        self._tally = LoadTally(gpus)
        self._load = self._tally.load()
        self._ending = threading.Event()
        self._left = False  # nobody waits for the thread any more
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def load(self) -> Load:
        """What was added up so far, or in all."""
        return self._load

    def start(self) -> Self:
        """Open the logs and begin to watch; returns at once."""
        if self._thread is not None:
            raise BadArgument("this has been started before", fix="make a new one for each stretch of time")
        self._logs.open()
        self._thread = threading.Thread(target=self._run, name="hotloop watch", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> Load:
        """Take a last reading and end; gives the load. A driver that hangs is not waited for."""
        if self._thread is None or os.getpid() != self._process:
            return self.load
        self._ending.set()
        self._thread.join(LAST_READING)
        if self._thread.is_alive() and not self._left:
            self._left = True
            note = f"the last reading took longer than {LAST_READING:.0f} s and was not waited for"
            self._load = replace(self._load, notes=(*self._load.notes, note))
        return self.load

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            with self._sampler() as read:
                self._sample_until_the_end(read)
        except Exception as error:  # noqa: BLE001  # a broken driver may raise anything, and it is not the training's fault
            self._note("the hardware is not watched", error)
        self._logs.close()
        self._note_failures()

    @contextmanager
    def _sampler(self) -> Iterator[Callable[[], Reading]]:
        if self._read is not None:
            yield self._read
        elif self._gpus is not None and not self._gpus:  # as on a CPU: the driver of GPUs is left alone
            around = Around()
            yield lambda: Reading(time.time(), around.read())
        else:
            from hotloop.monitor.sampler import Sampler  # noqa: PLC0415  # NVML is looked for in this thread

            with Sampler() as sampler:
                yield sampler.read

    def _sample_until_the_end(self, read: Callable[[], Reading]) -> None:
        due = time.monotonic()
        while True:
            ending = self._ending.is_set()  # asked before the reading: one always comes after the end
            self._sample(read)
            if ending or self._left:
                return
            now = time.monotonic()
            due = due + self.every if due + self.every > now else now + self.every
            self._ending.wait(due - now)

    def _sample(self, read: Callable[[], Reading]) -> None:
        try:
            reading = read()
        except Exception as error:  # noqa: BLE001  # the same
            self._note("a reading failed", error)
            return
        if self._left:
            return
        self._tally.add(reading, time.monotonic())
        self.latest, self._load = reading, self._tally.load()  # whole records change hands, so that nobody needs a lock
        if not self._logs.is_empty:
            step = self._load.samples - 1 if self._step is None else self._step()
            self._logs.write(scalars(reading, self._gpus), step=step, time=reading.time)
            self._note_failures()

    def _note_failures(self) -> None:
        """A full disk, a closed log: the training goes on without it."""
        for what, error in self._logs.failures():
            self._note(what, error)

    def _note(self, what: str, error: Exception) -> None:
        self._tally.note(f"{what}: {type(error).__name__}: {error}")
        if not self._left:
            self._load = self._tally.load()
