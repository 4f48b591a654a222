"""The simulated GPU in this process: put in place, run something, taken away."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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
from hotloop.apps.simulate.findings import Findings, relative
from hotloop.apps.simulate.functions import Repairs
from hotloop.apps.simulate.known import Known
from hotloop.apps.simulate.replaced import Patches
from hotloop.apps.simulate.second_order import SecondOrder
from hotloop.apps.simulate.shim import set_gpus
from hotloop.apps.simulate.simulated_storages import Storages
from hotloop.apps.simulate.simulation_record import COMPLETED, NO_GPU, SHORT, Branch, ShortenedLoop, Simulation
from hotloop.apps.simulate.syncs import Syncs
from hotloop.apps.simulate.telling import Circumstances, Teller
from hotloop.apps.simulate.twins import Twins
from hotloop.placement.sites import Site
from hotloop.printing.text import size
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
    others: Sequence[Listener] = ()  # that keep the memory of further GPUs
    asked: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.syncs = Syncs(self.card)
        self.teller = Teller([*self.listeners, self.syncs], self.others)
        self.findings = Findings()
        self.circumstances = Circumstances()
        self.known = Twins() if self.values else Known()
        self.gpu = SimulatedGpu(self.teller, self.circumstances, Storages(self.teller), self.known, self.findings)
        self.gpu.count = 1 + len(self.others)
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
        memory = next((each for each in self.listeners if hasattr(each, "memory_stats")), self.syncs)
        self._memories: list[Any] = [memory, *self.others]
        self._cuda = Cuda(self.card, self.gpu, self._memories)
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
        stack.callback(set_gpus, 1)
        set_gpus(self.gpu.count)
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
        with self.gpu.between.aside():
            self.borrowed.steps(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            closure = len(args) > 1 or kwargs  # gradients come during the step
            if self.gpu.accumulated and not closure and all(p.grad is None for p in parameters):
                self.findings.orphans(optimizer)

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.gpu.by_hand.leave_to_optimizer()
        with self.gpu.between.aside():
            self.conversions.name_all(optimizer)
        self.gpu.accumulated = False
        if self._rounds.ends(id(optimizer)):
            self._step_made()

    def _step_made(self) -> None:
        self.gpu.between.stepped()
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
        for listener in self.listeners:
            told = getattr(listener, "to_record", None)
            record = told() if told is not None else {}
            if status in (COMPLETED, SHORT) or not _VERDICTS & record.keys():
                said |= {**record, "notes": (*said["notes"], *record.get("notes", ()))}
        if self.others and "fits" in said:
            said |= self._fullest(said["notes"])
        return Simulation(
            gpu=self.card.key,
            gpus=self.gpu.count,
            steps=self.completed if self.steps is None else self.steps,
            completed=self.completed,
            status=status,
            findings=self.findings.all(folder),
            copies=self.syncs.copies(folder),
            syncs=self.syncs.syncs(folder),
            branches=tuple(Branch(relative(p.file, folder), p.line) for p in self.gpu.values.branches.seen),
            shortened=tuple(ShortenedLoop(relative(p.file, folder), p.line) for p in self.evaluations.ended),
            notes=(*notes, *self._notes(folder), *said.pop("notes")),
            **said,
        )

    def find_idle(self, place: Site | None = None) -> bool:
        """Whether there was a training, and none of it on the device."""
        idle = bool(self.completed) and not self.gpu.trained
        if idle:
            self.findings.add(NO_GPU, "the training runs on the CPU alone and never uses the GPU", _TO_GPU, place)
        return idle

    def _fullest(self, notes: Sequence[str]) -> dict[str, Any]:
        """What is told of memory is told of the GPU that has least room, and of the others their peaks."""
        records = [memory.to_record() for memory in self._memories]
        order = {False: 2, None: 1, True: 0}
        worst = max(range(len(records)), key=lambda n: (order[records[n]["fits"]], records[n]["peak"].process))
        peaks = tuple(record["peak"] for record in records)
        told = ", ".join(f"cuda:{number} {size(peak.process)}" for number, peak in enumerate(peaks))
        about = f"the GPUs at their peaks: {told}; all else that is told of memory is told of cuda:{worst}"
        kept = [note for note in notes if note not in records[0]["notes"]]
        return {**records[worst], "devices": peaks, "notes": (about, *kept, *records[worst]["notes"])}

    def _notes(self, folder: Path) -> list[str]:
        lines = [f"{relative(p.file, folder)}:{p.line}" for p in sorted(self.findings.guessed, key=lambda p: p.line)]
        notes = []
        if lines:
            notes.append(f"a shape depends on values at {', '.join(lines)}: half of the elements was assumed")
        if self.findings.unknown:
            notes.append(f"operations that cannot be simulated: {', '.join(sorted(self.findings.unknown))}")
        if self.conversions.compiled:
            notes.append("torch.compile was left out: its memory and its speed are not simulated")
        notes += self.conversions.left_out
        for p, name in self.conversions.saved.written.items():
            at = f"{relative(p.file, folder)}:{p.line}"
            notes.append(f"torch.save wrote made-up numbers to {name}, which the script had opened for it, at {at}")
        branches = [f"{relative(p.file, folder)}:{p.line}" for p in self.gpu.values.branches.seen]
        if branches:
            at = ", ".join(sorted(branches))
            notes.append(
                f"a branch depends on invented values, at {at}: hotloop.simulate(…, values=True) computes them"
            )
        ended = sorted(f"{relative(p.file, folder)}:{p.line}" for p in self.evaluations.ended)
        if ended:
            notes.append(f"loops that only evaluate were ended after rounds that are alike, at {', '.join(ended)}")
        flipped = [f"{relative(p.file, folder)}:{p.line}" for p in self.gpu.values.flipped]
        if flipped:
            notes.append(f"a loop waited for values at {', '.join(sorted(flipped))}: other answers were tried")
        if self.values and self._cuda.replayed:
            notes.append("replays of a CUDA graph are not computed: what it writes to is as at its capture")
        return [*notes, *self.known.notes()]


def _set_for_a_while(stack: ExitStack, setter: Callable[[Any], Any], before: Any, value: Any) -> None:
    stack.callback(setter, before)
    setter(value)
