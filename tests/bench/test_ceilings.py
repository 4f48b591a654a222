"""What a device can do at most is measured with the switches that its name says, and they are put back."""

import torch

from hotloop.bench.ceilings import ceilings
from hotloop.bench.switches import OwnSwitches, Switches

from .racing import CPU


def test_a_cpu_has_a_speed_of_arithmetic_and_of_memory() -> None:
    before = Switches.now()
    limits = ceilings(CPU, quick=True)
    assert set(limits) == {"fp32", "bytes"}
    assert all(limit > 1e6 for limit in limits.values())
    assert Switches.now() == before


def test_a_contestants_switches_hold_in_its_turns_only() -> None:
    before = Switches.now()
    one, two = OwnSwitches(CPU), OwnSwitches(CPU)
    with one.turn():
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    assert Switches.now() == before
    with two.turn():
        assert Switches.now() == before
    with one.turn():
        assert torch.backends.cudnn.benchmark
        assert torch.get_float32_matmul_precision() == "high"
    assert Switches.now() == before
