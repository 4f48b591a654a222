"""A device that is not there is refused with the reason that `hotloop device` gives, wherever it is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.device.causes import why_no_cuda
from hotloop.device.probe import probe
from hotloop.errors import BadArgument, DeviceUnavailable

X = torch.ones(2, 2)
CALLS: dict[str, Callable[[Any], object]] = {
    "move": lambda device: hotloop.move({"x": X}, device),
    "place": lambda device: hotloop.place(nn.Linear(2, 2), device),
    "stream": lambda device: next(iter(hotloop.stream([X], device))),
    "usage": hotloop.usage,
    "measure": lambda device: hotloop.measure(lambda: None, device=device),
    "evaluate": lambda device: hotloop.evaluate(
        nn.Identity(), [(X, X)], {"mean": lambda output, target: output}, device=device
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_cuda(call: Callable[[Any], object]) -> None:
    with pytest.raises(DeviceUnavailable) as refusal:
        call("cuda")
    assert why_no_cuda(probe())[0].what in str(refusal.value)
    assert "fix:" in str(refusal.value)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", ["banana", "auto", "cuda:x"])
def test_no_device_at_all(call: Callable[[Any], object], name: str) -> None:
    with pytest.raises(BadArgument, match="not the name of a device") as refusal:
        call(name)
    assert "fix:" in str(refusal.value)
