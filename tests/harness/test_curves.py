"""The losses of both loops come from the same weights and batches."""

import pytest

from harness.curves import curves
from harness.workloads import workload

from .racing import CPU


def test_a_plain_loop_gives_the_tutorials_losses_to_the_bit() -> None:
    work = workload("mlp", "cpu", quick=True)
    drawn = curves(work, CPU, 12, plan="plain")  # three epochs
    assert drawn.steps == tuple(range(1, 13))
    assert drawn.hotloop == drawn.tutorial
    assert drawn.again == drawn.tutorial  # nothing in it is random
    assert sum(drawn.tutorial[-4:]) < sum(drawn.tutorial[:4])


def test_random_masks_are_the_same_in_both_and_others_the_second_time() -> None:
    drawn = curves(workload("sprites", "cpu", quick=True), CPU, 4, plan="plain")
    assert drawn.hotloop == drawn.tutorial
    assert drawn.again != drawn.tutorial


def test_the_tuned_loop_stays_close() -> None:
    drawn = curves(workload("mlp", "cpu", quick=True), CPU, 8, plan_for=1)
    assert drawn.hotloop == pytest.approx(drawn.tutorial, rel=1e-3)
