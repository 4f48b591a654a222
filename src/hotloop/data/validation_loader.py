"""`Validation`: the validation loader of a run, and its state between evaluations."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

from hotloop._torch import keeps_workers
from hotloop.data.epochs import Position
from hotloop.data.loader_rng import LoaderRng, LoaderRngState
from hotloop.data.loader_workers import may_keep
from hotloop.data.on_device import is_constant
from hotloop.data.streams import Stream


class Validation:
    """The validation loader. With persistent workers its `Stream` persists too, for it knows their rng states."""

    def __init__(self, loader: Iterable[Any] | None, device: torch.device, *, saved: bool) -> None:
        """`saved`: whether the run has checkpoints, so that the rng states of workers must be known."""
        self.loader: Any = loader
        self._rng: LoaderRng | None = None
        self._stream: Stream[Any] | None = None
        self._unknown: str | None = None
        if type(loader) is DataLoader and loader.num_workers and loader.persistent_workers:
            if not keeps_workers(loader):
                self.loader = self._stream = Stream(loader, device, origins=saved)
            elif not is_constant(loader.dataset):
                self._unknown = "the validation loader's workers were there before, and what they draw from is unknown"
        elif type(loader) is DataLoader and may_keep(loader) and not is_constant(loader.dataset):
            self.loader = Stream(loader, device)  # which keeps workers that begin each epoch as new ones
        if self._stream is None and loader is not None:
            here = isinstance(loader, DataLoader) and not loader.num_workers  # where items are made
            self._rng = LoaderRng(loader, loader.dataset if here and isinstance(loader, DataLoader) else None)

    def close(self) -> None:
        """Stop the workers at the end of a run; the next run starts its own."""
        if isinstance(self.loader, Stream):
            self.loader.close(persistent=True)

    @property
    def changed_in_workers(self) -> list[str]:
        """Names of state that items changed in persistent workers."""
        names = [] if self._stream is None else self._stream.changed_in_workers
        return [f"validation {name}" for name in names]

    def state_dict(self) -> dict[str, Any] | None:
        """The state between two evaluations, as plain data and tensors."""
        if self._stream is not None:
            return {"position": self._stream.position(None).state_dict()}
        if self._rng is None:
            return None
        state = self._rng.get_state()
        return {"own": list(state.own), "samplers": list(state.samplers), "unknown": self._unknown}

    def load_state_dict(self, state: dict[str, Any] | None) -> str | None:
        """Load a state; returns why batches may differ, or None. The global rng states may change."""
        if state is None or self.loader is None:
            return None
        if "position" in state:
            if self._stream is None:
                return "the validation loader has other workers than it had"
            why = self._stream.resume(Position.from_state_dict(state["position"])).reason
            return why and f"in the evaluations, {why}"
        if self._rng is None:
            return "the validation loader has other workers than it had"
        own, samplers = tuple(state["own"]), tuple(state["samplers"])
        self._rng.set_own_state(LoaderRngState(torch.get_rng_state(), own=own, samplers=samplers))
        why = state.get("unknown")
        return why and str(why)
