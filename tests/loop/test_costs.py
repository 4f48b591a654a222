"""What hotloop does beside a step, counted from outside: expensive looks at rng states are rare."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotloop

STEPS = 300


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts how often somebody reads the rng state of NumPy or Python, which takes as long as a small step."""
    count = 0

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return call(*args, **options)

        return counted

    monkeypatch.setattr(np.random, "get_state", counting(np.random.get_state))
    monkeypatch.setattr(random, "getstate", counting(random.getstate))
    return lambda: count


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "bf16"}, {"accumulate": 2}, {"clip_norm": 1.0}, {"plan": hotloop.Plan("cpu", fused=True)}],
    ids=["plain", "bf16", "accumulate", "clip", "fused"],
)
def test_a_step_takes_no_full_look_at_rng_states(options: dict[str, Any], looks: Callable[[], int]) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    batch = (torch.randn(8, 4), torch.randn(8, 1))
    options = {"plan": "plain", **options}
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss(), device="cpu", **options)
    for given in loop.batches([batch] * STEPS):
        loop.step(given)
    assert looks() <= 64  # a few looks at the start and one in 257 later, each at two generators


def test_an_evaluation_takes_no_full_look_at_rng_states(looks: Callable[[], int]) -> None:
    model = nn.Linear(4, 1)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss(), device="cpu", plan="plain")
    loop.evaluate([(torch.randn(8, 4), torch.randn(8, 1))] * STEPS)
    assert looks() <= 24
