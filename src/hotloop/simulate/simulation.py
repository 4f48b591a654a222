"""The simulated GPU in this process: put in place, run something, taken away."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotloop.rounds import Rounds
from hotloop.scripts import Enough
from hotloop.simulate.conversions import Conversions
from hotloop.simulate.cuda import CardLike, Cuda
from hotloop.simulate.dispatch import SimulatedGpu
from hotloop.simulate.events import Listener
from hotloop.simulate.findings import Findings, relative
from hotloop.simulate.functions import Repairs
from hotloop.simulate.kernels import Kernels
from hotloop.simulate.patches import Patches
from hotloop.simulate.record import Simulation
from hotloop.simulate.storages import Storages
from hotloop.simulate.syncs import Syncs
from hotloop.simulate.telling import Circumstances, Teller
from hotloop.simulate.values import Values


@dataclass
class Engine:
    """Everything of one simulation."""

    card: CardLike
    listeners: Sequence[Listener]
    steps: int
    asked: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.syncs = Syncs(self.card)
        self.teller = Teller([*self.listeners, self.syncs])
        self.findings = Findings()
        self.circumstances = Circumstances()
        self.storages = Storages(self.teller)
        self.values = Values(self.storages)
        self.gpu = SimulatedGpu(self.teller, self.circumstances, self.storages, self.values, self.findings)
        self.conversions = Conversions(self.gpu)
        self.completed = 0
        self.on_enough: Callable[[], None] = lambda: None
        self._rounds = Rounds()
        memory = next((each for each in self.listeners if hasattr(each, "memory_stats")), self.syncs)
        self._cuda = Cuda(self.card, self.teller, memory)  # type: ignore[arg-type]
        self._patches = Patches()
        self._stack: list[Any] = []

    def __enter__(self) -> "Engine":
        torch._C._set_only_lift_cpu_tensors(True)
        self._cuda.install(self._patches)
        Kernels(tuple(self.card.capability)).install(self._patches)  # type: ignore[arg-type]
        self.conversions.install(self._patches)
        torch.__future__.set_swap_module_params_on_conversion(True)
        torch.backends.mha.set_fastpath_enabled(False)
        self._expect_optimizers()
        hooks = [
            register_optimizer_step_pre_hook(self._steps),
            register_optimizer_step_post_hook(self._stepped),
        ]
        self._stack = [
            self.circumstances,
            self.gpu,
            Repairs(self.gpu),
            torch.autograd.set_multithreading_enabled(False),
        ]
        for each in self._stack:
            each.__enter__()
        self._hooks = hooks
        return self

    def __exit__(self, *error: Any) -> None:
        for each in reversed(self._stack):
            each.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self.conversions.remove()
        torch.backends.mha.set_fastpath_enabled(True)
        torch.__future__.set_swap_module_params_on_conversion(False)
        self._patches.restore()
        torch._C._set_only_lift_cpu_tensors(False)

    def _expect_optimizers(self) -> None:
        made = Optimizer.__init__

        def make(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            made(optimizer, *args, **kwargs)
            self._rounds.expect(id(optimizer))

        self._patches.set(Optimizer, "__init__", make)

    def _steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer whose parameters got nothing, while others got gradients, holds the wrong ones."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        closure = len(args) > 1 or kwargs  # gradients come during the step
        if self.gpu.accumulated and not closure and all(p.grad is None for p in parameters):
            self.findings.orphans(optimizer)

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.conversions.name_all(optimizer)
        self.gpu.accumulated = False
        if not self._rounds.ends(id(optimizer)):
            return
        self.teller.step()
        self.circumstances.forget()
        self.values.stepped()
        self.completed += 1
        if self.completed >= self.steps:
            self._end()

    def _end(self) -> None:
        if not self.asked:
            self.on_enough()
        self.asked += 1
        if self.asked > 2:  # the script catches every exception, so it is ended without its own clean-up
            sys.stdout.flush()
            os._exit(0)
        raise Enough

    def result(self, folder: Path, notes: Sequence[str] = ()) -> Simulation:
        """What was found, with what the listeners have to say."""
        said: dict[str, Any] = {"notes": ()}
        for listener in self.listeners:
            told = getattr(listener, "to_record", None)
            if told is not None:
                record = told()
                said |= {**record, "notes": (*said["notes"], *record.get("notes", ()))}
        return Simulation(
            gpu=self.card.key,
            steps=self.steps,
            completed=self.completed,
            findings=self.findings.all(folder),
            copies=self.syncs.copies(folder),
            syncs=self.syncs.syncs(folder),
            notes=(*notes, *self._notes(folder), *said.pop("notes")),
            **said,
        )

    def _notes(self, folder: Path) -> list[str]:
        lines = [f"{relative(p.file, folder)}:{p.line}" for p in sorted(self.findings.guessed, key=lambda p: p.line)]
        notes = []
        if lines:
            notes.append(f"a shape depends on values at {', '.join(lines)}: half of the elements was assumed")
        if self.findings.unknown:
            notes.append(f"operations that cannot be simulated: {', '.join(sorted(self.findings.unknown))}")
        if self.conversions.compiled:
            notes.append("torch.compile was left out: its memory and its speed are not simulated")
        flipped = [f"{relative(p.file, folder)}:{p.line}" for p in self.values.flipped]
        if flipped:
            notes.append(f"a loop waited for values at {', '.join(sorted(flipped))}: other answers were tried")
        return notes


def simulate(run: Callable[[], Any], card: CardLike, listeners: Sequence[Listener] = (), *, steps: int = 3) -> Engine:
    """Call something with the simulated GPU in place, until it ends or has made its steps."""
    engine = Engine(card, listeners, steps)
    with engine, suppress(Enough):
        run()
    return engine
