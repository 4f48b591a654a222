"""A reader follows a batch from `fit` to the model's `forward` through few functions of hotloop."""

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop import Loop

MOST = 8
PACKAGE = str(Path(hotloop.__file__).parent)


class Kept(logging.Handler):
    """A list that no look at a step's state sees: a step that changes one is not captured."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: list[list[str]] = []


KEPT = Kept()


class Traced(nn.Module):
    """Notes the functions of hotloop that lead to its `forward`, from the outermost on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        frames = [f for f in inspect.stack(context=0)[1:] if f.filename.startswith(PACKAGE)]
        KEPT.ways.append([f"{Path(f.filename).name}:{f.function}" for f in reversed(frames)])
        return self.layer(x)


def ways_of(device: str, plan: Any = "plain", **options: Any) -> list[list[str]]:
    """The way of each call of `forward` in a run."""
    model = Traced()
    data = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,))), 8)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loop = Loop(model, optimizer, nn.CrossEntropyLoss(), device=device, plan=plan, **options)
    loop.fit(data, epochs=2, progress=False, monitor=False)
    ways, KEPT.ways = KEPT.ways, []
    return ways


@pytest.mark.parametrize("options", [{}, {"precision": "bf16", "accumulate": 2, "clip_norm": 1.0}], ids=["fp32", "all"])
def test_few_functions_lead_to_forward(options: dict[str, Any]) -> None:
    usual = ways_of("cpu", **options)[-1]
    assert usual[0] == "loop.py:fit"
    assert len(usual) <= MOST, usual


@pytest.mark.gpu
def test_few_functions_lead_to_forward_in_a_capture() -> None:
    captured = ways_of("cuda", hotloop.Plan("cuda", graph=1))[-1]
    assert "captured.py:__call__" in captured
    assert len(captured) <= MOST + 2, captured  # what undoes a capture that fails, and what watches one
