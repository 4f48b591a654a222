"""A GPU that is not here, for a block of the person's own program: a cell of a notebook, a test."""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from io import StringIO
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Self

import torch
from rich.console import Console, RenderableType

from hotloop.apps.simulate import shim
from hotloop.apps.simulate._torch import default_device
from hotloop.apps.simulate.cards import Card, card
from hotloop.apps.simulate.shown import simulation_words
from hotloop.apps.simulate.simulation import Engine
from hotloop.apps.simulate.simulation_record import DeviceFinding, Peak, Simulation
from hotloop.apps.simulate.timeline import Time
from hotloop.errors import BadArgument, HotloopError
from hotloop.placement.sites import Site, is_users
from hotloop.scripts.as_main import Enough

_one_at_a_time = Lock()  # the device is there for the whole process
WIDTH = 110  # columns of the words, where no terminal says how wide it is


def simulate(gpu: str | Card = "h200", *, steps: int | None = None, values: bool = False) -> "SimulationContext":
    """A block in which CUDA tensors are on a simulated GPU; ends after `steps` of the optimizer where given.

    With `values` they are computed on the host as well, so that losses are true and so is what depends on them.
    """
    return SimulationContext(gpu, steps=steps, values=values)


class SimulationContext:
    """What `hotloop.simulate(…)` gives: a block in which CUDA tensors are on a simulated GPU, and then its result.

    >>> with hotloop.simulate("rtx4090") as sim:  # doctest: +SKIP
    ...     model = Net().cuda()
    ...     train(model, batches)
    >>> sim.peak.process, sim.findings  # doctest: +SKIP

    Models and optimizers that were there before are restored, with their values.
    """

    def __init__(self, gpu: str | Card = "h200", *, steps: int | None = None, values: bool = False) -> None:
        if steps is not None and steps < 1:
            raise BadArgument(f"steps={steps}", fix="give at least one step, or leave it out to run the whole block")
        self.card = card(gpu) if isinstance(gpu, str) else gpu
        self._steps, self._values = steps, values
        self._engine: Engine | None = None
        self._stack = ExitStack()
        self._result: Simulation | None = None

    @property
    def result(self) -> Simulation:
        """What happened: all of it after the block, and within it what happened so far."""
        if self._result is not None:
            return self._result
        if self._engine is None:
            raise HotloopError("nothing was simulated yet", fix="with hotloop.simulate(…) as sim: …, then sim.result")
        return self._engine.result(Path.cwd())

    @property
    def peak(self) -> Peak:
        """The most memory, in bytes."""
        peak = self.result.peak
        assert peak is not None  # there is a model of memory in every block
        return peak

    @property
    def findings(self) -> tuple[DeviceFinding, ...]:
        """What would go wrong, each with its line."""
        return self.result.findings

    def __enter__(self) -> Self:
        if self._engine is not None:
            raise HotloopError("a simulation runs once", fix="make another: with hotloop.simulate(…) as sim: …")
        with ExitStack() as stack:
            stack.enter_context(_device())
            engine = Engine(self.card, [Time(self.card)], self._steps, values=self._values, own_process=False)
            stack.enter_context(engine)
            self._engine, self._stack = engine, stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        assert self._engine is not None
        if isinstance(error, torch.OutOfMemoryError):
            fix = "a smaller batch, bf16, checkpointing or accumulation"
            self._engine.findings.add("out-of-memory", str(error), fix, _innermost(traceback))
        if error is None:
            with suppress(Enough):
                self._engine.gpu.by_hand.finish()
            self._engine.find_idle()
        try:
            self._result = self._engine.result(Path.cwd())
        finally:
            self._stack.close()
        return isinstance(error, Enough)

    def __rich_console__(self, *_: object) -> Iterator[RenderableType]:
        return simulation_words(self.result, "this block")

    def __repr__(self) -> str:
        if self._engine is None:
            return f"<a simulated {self.card.name}, not used yet>"
        words = StringIO()
        Console(file=words, width=WIDTH, color_system=None).print(self)
        return words.getvalue().rstrip()


class _device:  # noqa: N801  # used as a function is
    """The simulated device in this process; taken away again, whatever happens."""

    def __enter__(self) -> None:
        if not _one_at_a_time.acquire(blocking=False):
            raise HotloopError("a simulated GPU is in use in this process", fix="let one block end before the next")
        try:
            self._library = shim.load(shim.library())
            _settle()
            self._default = default_device()
            shim.install(self._library)
        except BaseException:
            _one_at_a_time.release()
            raise

    def __exit__(self, *_: object) -> None:
        shim.remove(self._library)
        if self._default != default_device():
            torch.set_default_device(self._default)
        _one_at_a_time.release()


def _settle() -> None:
    """Let PyTorch do now what it does once in a process: it would do it for the simulated device otherwise."""
    if torch.cuda.is_available():
        torch.cuda.init()
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).backward()  # autograd's threads, one for each real device


def _innermost(traceback: TracebackType | None) -> Site | None:
    """The innermost line of the person's own code that an error came through."""
    found = None
    while traceback is not None:
        frame = traceback.tb_frame
        if is_users(frame):
            found = Site(frame.f_code.co_filename, traceback.tb_lineno, frame.f_code.co_name)
        traceback = traceback.tb_next
    return found
