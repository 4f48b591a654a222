"""Throughput against ranks: a real measurement of two processes over gloo, and what is made of one."""

import psutil
import pytest
import torch

from harness.scaling import GPUS, LINKS, GroupFailed, ScalingSetup, run_scaling
from harness.scaling_records import DDP, LOOP, ScalingBenchmark
from hotloop.errors import BadArgument

from ..warm import ForkedChild, Warm

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured(warm: Warm) -> tuple[ScalingBenchmark, list[str]]:
    said: list[str] = []
    setup = ScalingSetup("mlp", CPU, ranks=(2,), repeats=2, quick=True, threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkedChild, "server", warm.server, raising=False)
        patch.setattr("harness.scaling.Child", ForkedChild)
        return run_scaling(setup, command="python -m harness --scaling", tell=said.append), said


def test_two_ranks_are_measured_beside_one_and_beside_the_prediction(
    measured: tuple[ScalingBenchmark, list[str]],
) -> None:
    found, said = measured
    one, two = (each for each in found.measured if each.way == DDP)
    assert (one.ranks, two.ranks) == (1, 2)
    assert (found.backend, found.unit, found.threads, found.quick) == ("gloo", "rows", 1, True)
    assert (one.efficiency.low, one.efficiency.median, one.predicted) == (1, 1, None)
    for each in (one, two):
        assert 0 < each.step.low <= each.step.median <= each.step.high
        assert each.rate.high == pytest.approx(each.ranks * 64 / each.step.low)
    assert found.others is not None
    assert 0 <= found.others <= 1
    assert two.predicted is not None
    assert two.communication is not None
    assert two.sharing is not None
    assert two.error == two.predicted.efficiency - two.efficiency.median
    assert any("all-reduce of 2 ranks" in words for words in said)


def test_the_prediction_is_of_the_step_of_one_rank_and_the_measured_all_reduces(
    measured: tuple[ScalingBenchmark, list[str]],
) -> None:
    found, _ = measured
    one, two = (each for each in found.measured if each.way == DDP)
    (line,) = found.fits
    assert two.predicted is not None
    assert found.step.seconds == pytest.approx(one.step.median)
    assert found.step.gradient_bytes == 4 * (16 * 64 + 64 + 64 + 1)
    assert all(0 <= gradient.ready <= 1 for gradient in found.step.gradients)
    assert min(line.seconds) > 0
    at = line.sizes.index(found.step.gradient_bytes)  # the one bucket of DDP was measured too
    assert two.predicted.communication == pytest.approx(line.seconds[at])
    assert found.step.copies > 0
    most = one.step.median + two.predicted.communication + found.step.copies
    assert two.predicted.seconds <= most * (1 + 1e-9)
    assert two.waiting is not None
    assert one.waiting is None


def test_hotloops_own_loop_is_measured_or_says_why_not(measured: tuple[ScalingBenchmark, list[str]]) -> None:
    found, _ = measured
    ranks = {each.ranks for each in found.measured if each.way == LOOP}
    assert ranks == {1, 2} or any(LOOP in why for why in found.failures)


def test_more_gpus_are_modelled_on_named_links(measured: tuple[ScalingBenchmark, list[str]]) -> None:
    found, _ = measured
    assert len(found.modelled) == 2 * len(LINKS)
    for each in found.modelled:
        assert tuple(step.gpus for step in each.steps) == GPUS
        assert all(0 < step.efficiency <= 1 for step in each.steps)
    assert ScalingBenchmark.from_json(found.to_json()) == found


@pytest.mark.usefixtures("forked_children")
def test_a_workload_that_cannot_be_measured_so_is_refused_and_no_process_stays() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(GroupFailed, match="several objectives"):
        run_scaling(ScalingSetup("dcgan", CPU, ranks=(1,), quick=True, threads=1))
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize("wrong", [{"ranks": (0, 2)}, {"ranks": ()}, {"repeats": 0}])
def test_what_cannot_be_meant_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadArgument):
        ScalingSetup("mlp", CPU, **wrong)  # type: ignore[arg-type]
