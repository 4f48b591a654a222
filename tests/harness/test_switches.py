"""What one contestant sets must not speed up another."""

import torch

from harness.switches import OwnSwitches, Switches

from .racing import CPU


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
