"""`Preparation`: a compilation beside the training, on a copy of the model, so that nothing waits for it."""

import copy
import threading
import time
from typing import Any

import torch
from torch import nn

from hotloop.loop.compilation import compiled_objectives, hushed
from hotloop.loop.rig import Rig
from hotloop.loop.turns import Turn
from hotloop.objective import Objective, autocast, losses_of
from hotloop.placement import map_tensors
from hotloop.plan import Plan
from hotloop.text import COMPILING


class Preparation:
    """Compiles the forward and backward pass of a plan in a thread; `compiled` serves the model itself as well.

    Only gradients of the copy are asked for, so that nothing of the training is touched. A model that draws random
    numbers is not prepared this way: both would draw from the one generator of the device.
    """

    def __init__(self, model: nn.Module, turns: tuple[Turn, ...], plan: Plan, batch: Any) -> None:
        self.compiled: dict[str, Objective] = {}
        self.seconds = 0.0
        self.failure: str | None = None
        self.done = False
        self._turns = turns
        self._plan = plan
        self._model = copy.deepcopy(model)
        self._batch = map_tensors(Rig(plan, model, ()).inputs(batch), torch.clone)
        device = torch.device(plan.device)
        self._side = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)
            self._side.wait_stream(torch.cuda.current_stream(device))
        self._thread = threading.Thread(target=self._run, name=COMPILING, daemon=True)
        self._thread.start()

    @classmethod
    def begun(cls, model: nn.Module, turns: tuple[Turn, ...], plan: Plan, batch: Any) -> "Preparation | None":
        """One that has begun; None where the model cannot be copied."""
        try:
            return cls(model, turns, plan, batch)
        except Exception:  # noqa: BLE001  # a model may refuse to be copied in any way
            return None

    def wait(self) -> None:
        """Until it is done."""
        self._thread.join()

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            with torch.cuda.stream(self._side), hushed():
                self._compile()
        except Exception as error:  # noqa: BLE001  # a compiler may fail in any way; training goes on without
            self.failure = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        self.seconds = time.perf_counter() - start
        del self._model, self._batch
        self.done = True

    def _compile(self) -> None:
        self.compiled = compiled_objectives(self._turns, self._plan)  # here, since it loads the compiler for seconds
        device = torch.device(self._plan.device)
        for turn in self._turns:
            with autocast(device, self._plan.precision):
                losses = losses_of(self.compiled[turn.name], self._model, self._batch, turn.name)
            learning = [p for p in self._model.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(losses.total, learning, allow_unused=True)
            if all(gradient is None for gradient in gradients):
                raise RuntimeError("the objective does not use the model that it is given")
