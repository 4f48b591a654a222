"""A GPU for tests where there is none: the simulated one, which computes values and replays CUDA graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hotloop.apps.simulate.block import simulate
from hotloop.apps.simulate.operations import facts
from hotloop.apps.simulate.twins import Twins


class OwnGenerator(Twins):
    """Draws random numbers from the device's generator, as a GPU does, and leaves the host's alone."""

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if facts(func).determined or kwargs.get("generator") is not None:
            super().compute(func, args, kwargs, result)
            return
        host, device = torch.default_generator, torch.cuda.default_generators[0]
        before = host.get_state()
        host.set_state(device.get_state())
        try:
            super().compute(func, args, kwargs, result)
        finally:
            device.set_state(host.get_state())
            host.set_state(before)


@contextmanager
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps are captured there, too: without the values, as in `hotloop simulate`, nothing is to be gained by that."""
    monkeypatch.setattr("hotloop.levers.cuda_graph.is_simulated_gpu", lambda: False)
    monkeypatch.setattr("hotloop.apps.simulate.simulation.Twins", OwnGenerator)
    with simulate("h200", values=True):
        yield
