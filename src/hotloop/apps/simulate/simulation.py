"""The simulated GPU in this process: put in place, run something, taken away."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotloop.apps.simulate._torch import lifting_on_host
from hotloop.apps.simulate.borrowed import Borrowed
from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.conversions import Conversions
from hotloop.apps.simulate.cuda import Cuda
from hotloop.apps.simulate.dispatch import SimulatedGpu
from hotloop.apps.simulate.evaluations import Evaluations
from hotloop.apps.simulate.events import Listener
from hotloop.apps.simulate.families import ALL, left_whole
from hotloop.apps.simulate.findings import Findings, Syncs, relative
from hotloop.apps.simulate.functions import Repairs
from hotloop.apps.simulate.known import Known
from hotloop.apps.simulate.memory import MemoryListener
from hotloop.apps.simulate.replaced import Patches
from hotloop.apps.simulate.second_order import SecondOrder
from hotloop.apps.simulate.simulation_record import (
    COMPLETED,
    FAILED,
    NO_GPU,
    NO_STEPS,
    SETTLED,
    SHORT,
    ScriptLine,
    Simulation,
)
from hotloop.apps.simulate.telling import Circumstances, Storages, Teller
from hotloop.apps.simulate.twins import Twins
from hotloop.placement.sites import Site
from hotloop.printing.text import plural
from hotloop.scripts.as_main import Enough
from hotloop.scripts.training_steps import ByHand
from hotloop.step.rounds import Rounds

_VERDICTS = {"fits", "step_ms"}  # that a script gets which trained
_TO_GPU = 'move the model, model.to("cuda"), and each batch, x, y = x.to("cuda"), y.to("cuda")'


@dataclass
class Engine:
    """Everything of one simulation, until it has made its steps; without `steps` for as long as the person likes.

    With `values` they are computed on the host as well. In a process of its own, nothing of the person's has to be
    kept: large models are not drawn, and a script that does not end when it is told to is ended.
    """

    card: Card
    listeners: Sequence[Listener]
    steps: int | None
    values: bool = False
    own_process: bool = True
    asked: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.syncs = Syncs()
        given = next((each for each in self.listeners if isinstance(each, MemoryListener)), None)
        self.memory = given or MemoryListener(self.card)
        self.telling = [self.memory, *(each for each in self.listeners if each is not given)]  # of the result
        self.teller = Teller([*self.telling, self.syncs])
        self.findings = Findings()
        self.circumstances = Circumstances()
        self.known = Twins() if self.values else Known()
        self.gpu = SimulatedGpu(self.teller, self.circumstances, Storages(self.teller), self.known, self.findings)
        self.gpu.draws = self.values or not self.own_process
        self.gpu.beside_a_real_one = torch.cuda.is_initialized()
        self.gpu.by_hand = ByHand(self._step_made)
        self.borrowed = Borrowed()
        self.conversions = Conversions(self.gpu, None if self.own_process else self.borrowed)
        self.evaluations = Evaluations(self.gpu, self._is_trained)
        self.circumstances.evaluated = self.evaluations.called
        self.completed = 0
        self.on_enough: Callable[[], None] = lambda: None
        self._rounds = Rounds()
        self._held: set[int] = set()  # parameters of optimizers
        self._cuda = Cuda(self.card, self.gpu, self.memory)
        self.gpu.synchronizes = self._cuda.synchronizes
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:  # undone if something fails on the way
            self._install(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _install(self, stack: ExitStack) -> None:
        patches = Patches()
        stack.callback(setattr, self.gpu.fake, "gone", True)
        stack.callback(self.borrowed.restore)
        stack.callback(patches.restore)
        stack.enter_context(lifting_on_host())
        self._cuda.install(patches)
        stack.enter_context(left_whole())
        for family in ALL:
            if family.install is not None:
                family.install(patches, self.card.capability)
        SecondOrder().install(patches)
        stack.callback(self.conversions.remove)
        self.conversions.install(patches)
        self.evaluations.install(patches)
        future, attention = torch.__future__, torch.backends.mha
        swaps = future.get_swap_module_params_on_conversion()
        _set_for_a_while(stack, future.set_swap_module_params_on_conversion, swaps, True)
        _set_for_a_while(stack, attention.set_fastpath_enabled, attention.get_fastpath_enabled(), False)
        self._expect_optimizers(patches)
        stack.callback(register_optimizer_step_pre_hook(self._steps).remove)
        stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
        stack.enter_context(self.circumstances)
        stack.enter_context(self._in_this_thread())
        begin = Thread._bootstrap_inner  # type: ignore[attr-defined]

        def begun(thread: Thread) -> None:
            with self._in_this_thread():
                begin(thread)

        patches.set(Thread, "_bootstrap_inner", begun)

    @contextmanager
    def _in_this_thread(self) -> Iterator[None]:
        """What PyTorch keeps for each thread: a script may train in one of its own."""
        with self.gpu, Repairs(self.gpu), torch.autograd.set_multithreading_enabled(False):
            yield

    def _expect_optimizers(self, patches: Patches) -> None:
        made = Optimizer.__init__

        def make(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            self._rounds.expect(id(optimizer))
            self._held.update(id(p) for group in optimizer.param_groups for p in group["params"])
            self.borrowed.made(optimizer)

        patches.set(Optimizer, "__init__", make)

    def _is_trained(self, module: nn.Module) -> bool:
        """Whether a module is that of the training, or comes after it has begun: what others give may be its data."""
        return bool(self.completed) or any(id(p) in self._held for p in module.parameters())

    def _steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer whose parameters got nothing, while others got gradients, holds the wrong ones."""
        self.borrowed.steps(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        closure = len(args) > 1 or kwargs  # gradients come during the step
        if self.gpu.accumulated and not closure and all(p.grad is None for p in parameters):
            self.findings.orphans(optimizer)
        self.circumstances.optimizing = True

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.circumstances.optimizing = False
        self.gpu.by_hand.leave_to_optimizer()
        self.conversions.name_all(optimizer)
        self.gpu.accumulated = False
        if self._rounds.ends(id(optimizer)):
            self._step_made()

    def _step_made(self) -> None:
        self.teller.step()
        self.circumstances.forget()
        self.gpu.values.stepped()
        self.completed += 1
        if self.steps is not None and self.completed >= self.steps:
            self._end()

    def _end(self) -> None:
        if not self.asked:
            self.on_enough()
        self.asked += 1
        if self.asked > 2 and self.own_process:  # it catches every exception, so it is ended without its own clean-up
            sys.stdout.flush()
            os._exit(0)
        raise Enough

    def result(self, folder: Path, notes: Sequence[str] = (), status: str = COMPLETED) -> Simulation:
        """What was found, with what the listeners have to say where the script ran long enough for it."""
        said: dict[str, Any] = {"notes": (), "gpu_name": self.card.name, "gpu_memory": self.card.memory}
        for listener in self.telling:
            record = listener.to_record()
            if status in (COMPLETED, SHORT) or not _VERDICTS & record.keys():
                said |= {**record, "notes": (*said["notes"], *record.get("notes", ()))}
        return Simulation(
            gpu=self.card.key,
            steps=self.completed if self.steps is None else self.steps,
            completed=self.completed,
            status=status,
            findings=self.findings.all(folder),
            copies=self.syncs.copies(folder),
            syncs=self.syncs.syncs(folder),
            shortened=_lines(self.evaluations.ended, folder),
            notes=(*notes, *self._notes(folder, status), *said.pop("notes")),
            **said,
        )

    def find_idle(self, place: Site | None = None) -> bool:
        """Whether there was a training, and none of it on the device."""
        idle = bool(self.completed) and not self.gpu.trained
        if idle:
            self.findings.add(NO_GPU, "the training runs on the CPU alone and never uses the GPU", _TO_GPU, place)
        return idle

    def _notes(self, folder: Path, status: str) -> list[str]:
        def at(places: Iterable[Site]) -> str:
            return ", ".join(f"{each.file}:{each.line}" for each in sorted(_lines(places, folder), key=astuple))

        notes, values = [], self.gpu.values
        if self.findings.guessed:
            where = at(self.findings.guessed)
            notes.append(f"a shape depends on values at {where}: half of the elements was assumed")
        if self.findings.unknown:
            notes.append(f"operations that cannot be simulated: {', '.join(sorted(self.findings.unknown))}")
        if self.conversions.compiled:
            notes.append("torch.compile was left out: its memory and its speed are not simulated")
        notes += self.conversions.left_out
        for place, name in self.conversions.saved.written.items():
            opened = f"{name}, which the script had opened for it, at {at([place])}"
            notes.append(f"torch.save wrote made-up numbers to {opened}")
        unsettled = self.completed < min(self.steps or 0, SETTLED) and status in (COMPLETED, NO_STEPS, FAILED)
        if unsettled and values.invented:
            made = f"after {self.completed} of {plural(self.steps or 0, 'step')}"
            read = f"perhaps by invented values, which it read at {at(values.invented)}"
            notes.append(f"the script ended {made}, {read}: hotloop.simulate(…, values=True) computes them")
        if ended := self.evaluations.ended:
            notes.append(f"loops that only evaluate were ended after rounds that are alike, at {at(ended)}")
        if values.flipped:
            notes.append(f"a loop waited for values at {at(values.flipped)}: other answers were tried")
        return [*notes, *self.known.notes()]


def _lines(places: Iterable[Site], folder: Path) -> tuple[ScriptLine, ...]:
    return tuple(ScriptLine(relative(place.file, folder), place.line) for place in places)


def _set_for_a_while(stack: ExitStack, setter: Callable[[Any], Any], before: Any, value: Any) -> None:
    stack.callback(setter, before)
    setter(value)
