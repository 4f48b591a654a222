"""The one gate to NVML, NVIDIA's management library: started once, watched, and started again when it dies."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hotloop.monitor.card import NvmlDevice
from hotloop.monitor.failures import Dead, Failed, judged
from hotloop.monitor.foreign import decoded
from hotloop.monitor.reading import Gpu

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds between attempts at a driver or a GPU that fails


class Library:
    """The binding, started, of which every call either answers or raises one kind of `Failed`."""

    def __init__(self, binding: Any = None) -> None:
        if binding is None:
            import pynvml  # noqa: PLC0415  # a broken installation must not break `import hotloop.monitor`

            binding = pynvml
        self.binding = binding
        self.ask("nvmlInit")

    def ask(self, question: str, *about: Any) -> Any:
        try:
            return getattr(self.binding, question)(*about)
        except Exception as error:  # a broken driver may raise anything; it is judged, not hidden
            raise judged(error) from error

    def or_none(self, question: str, *about: Any) -> Any:
        """The answer, or None: each call may fail on its own, on MIG, vGPU, WSL or an old driver."""
        try:
            return self.ask(question, *about)
        except Failed:
            return None


class Nvml:
    """All GPUs of this machine in NVML's order, which is that of `nvidia-smi`.

    CUDA_VISIBLE_DEVICES is not heeded: a monitor shows what others do as well. So `index` is not always the number
    that torch gives to a GPU; the UUID is the same for both.
    """

    def __init__(self, binding: Any = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._given, self._clock = binding, clock
        self._library: Library | None = None
        self._cards: list[NvmlDevice] = []
        self._known: tuple[Gpu, ...] = ()  # what stays known of each GPU while NVML is down
        self._gone: tuple[Gpu, ...] = ()  # those that were there once, and are not even lost
        self._why: str | None = None  # it is down
        self._pauses = Pauses(clock)
        self.driver: str | None = None

    def read(self) -> tuple[list[Gpu], list[str]]:
        """What each GPU tells, and what there is to say about those that do not. Never raises."""
        if (self._library is None or self._troubled()) and self._pauses.over():
            self._restart()
        if self._library is None:
            return self._down()
        try:
            seen = [card.read() for card in self._cards]
        except Dead as error:
            self._die(f"NVML stopped answering: {error}")
            return self._down()
        if not self._troubled():
            self._pauses.worked()
        elif self._pauses.over():
            self._pauses.failed()
        notes = [note for card in self._cards for note in card.complaints]
        notes += [f"GPU {gpu.index} ({gpu.name}, {gpu.uuid}) is not there any more" for gpu in self._gone]
        return seen, notes if self._cards else [*notes, "NVIDIA's driver answers, but it shows no GPU here"]

    def close(self) -> None:
        """Give everything back; a later `read` starts again."""
        if self._library is not None:
            self._library.or_none("nvmlShutdown")  # what is dead need not be closed
        self._cards, self._library = [], None

    def _troubled(self) -> bool:
        """Whether a GPU may come back, which only a library that starts anew would see."""
        return not self._cards or bool(self._gone) or any(card.lost for card in self._cards)

    def _restart(self) -> None:
        """Start the library, anew where it ran already, and fetch all handles."""
        self.close()
        try:
            self._library = library = Library(self._given)
            self.driver = decoded(library.or_none("nvmlSystemGetDriverVersion"))
            for index in range(library.ask("nvmlDeviceGetCount")):
                before = next((gpu for gpu in self._known if gpu.index == index), None)
                self._cards.append(NvmlDevice(library.ask, index, before, self._clock))
        except ImportError:
            self._die("the package nvidia-ml-py is not installed (fix: `pip install nvidia-ml-py`)")
        except Failed as error:
            self._die(str(error))
        else:
            here = tuple(card.known for card in self._cards)
            self._gone, self._known = _missing((*self._gone, *self._known), here), here
            self._why = None

    def _die(self, why: str) -> None:
        self.close()
        self._why = why
        self._pauses.failed()

    def _down(self) -> tuple[list[Gpu], list[str]]:
        """GPUs that were there stay in sight, with an error instead of numbers."""
        error = f"NVML does not answer: {self._why}"
        if not self._known:
            return [], [f"no NVIDIA GPU can be read: {self._why}"]
        note = (
            f"no NVIDIA GPU can be read at present: {self._why}; it is tried again every {LONGEST_PAUSE:.0f} s or less"
        )
        return [replace(gpu, error=error) for gpu in self._known], [note]


class Pauses:
    """Between attempts, each twice as long as the one before; none until something has failed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.worked()

    def worked(self) -> None:
        self._until, self._next = -float("inf"), FIRST_PAUSE

    def failed(self) -> None:
        self._until = self._clock() + self._next
        self._next = min(2 * self._next, LONGEST_PAUSE)

    def over(self) -> bool:
        return self._clock() >= self._until


def _missing(before: tuple[Gpu, ...], here: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    """The GPUs that were taken out: by UUID, since the others move up. None where not every UUID is known."""
    uuids = {gpu.uuid for gpu in here}
    return () if None in uuids else tuple(gpu for gpu in before if gpu.uuid is not None and gpu.uuid not in uuids)
