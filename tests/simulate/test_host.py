"""What an operation costs the host: measured on this machine where its GPU can run scripts."""

import statistics
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from hotloop.apps.simulate import host_cost
from hotloop.apps.simulate.cards import card
from hotloop.apps.simulate.table import HostCost
from hotloop.device.machine import cpu_name


def test_every_cost_of_a_host_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cost, "ROUNDS", 3)
    monkeypatch.setattr(host_cost, "WARM", 2)
    found = host_cost.measure(torch.device("cpu"))
    assert min(found.forward, found.backward, found.optimizer, found.other, found.launch, found.copy) > 0
    assert cpu_name() in found.name
    assert HostCost.from_json(found.to_json()) == replace(found, loading=0.0, working=0.0)


NET = """
import torch
from torch import nn

torch.manual_seed(0)
layers = [layer for _ in range(60) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
model = nn.Sequential(*layers).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(32, 64, device="cuda")


def step():
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


"""


@pytest.mark.gpu
def test_a_step_that_the_host_limits_is_foretold_with_the_host_at_hand(run) -> None:
    real: dict[str, object] = {"nn": nn}
    exec(NET, real)  # noqa: S102  # it is written above
    taken = []
    for _ in range(60):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        real["step"]()  # type: ignore[operator]
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - begun))
    ran = run(
        NET + "for _ in range(3):\n    step()\n", card=card("h200"), listeners=["hotloop.apps.simulate.timeline:Time"]
    )
    assert any(f"the host was measured on {cpu_name()}" in note for note in ran.result.notes)
    assert 0.5 < ran.result.step_ms.median / statistics.median(taken[10:]) < 2.0
