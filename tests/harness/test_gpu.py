"""On a CUDA GPU: every contestant trains, every expert's graphs do what the loop without them does, whole runs too."""

import pytest
import torch

from harness.contestants import NAMES, contestants
from harness.end_to_end import WholeRuns, run_end_to_end
from harness.running import race
from harness.workloads import END_TO_END, RACED, workload
from hotloop.profiling.ceilings import ceilings

from .racing import EXPERTS, PACKAGES, loss_of, needs_packages_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", 0)


@pytest.mark.parametrize("name", RACED)
def test_an_experts_loss_goes_down_through_its_graphs(name: str, gpu: torch.device) -> None:
    needs_packages_of(name)
    work = workload(name, gpu, quick=True)
    parts = work.parts()
    before = loss_of(work, parts)
    run = contestants(["expert"], experts=EXPERTS)["expert"](parts, gpu).run
    assert run(4) > 0
    parts.model.cpu()
    assert loss_of(work, parts) < before


@pytest.mark.parametrize("name", ["mlp", "cnn", "sprites", "gpt"])
def test_everyone_is_scored(name: str, gpu: torch.device) -> None:
    others = [each for each in NAMES if each != "trainer"]  # which has none of its own models here
    names = [each for each in others if each not in PACKAGES or _installed(PACKAGES[each])]
    done = race(workload(name, gpu, quick=True), contestants(names, experts=EXPERTS, plan_for=60), gpu, repeats=2)
    assert done.failures == []
    assert [score.contestant for score in done.scores] == names
    for score in done.scores:
        assert 0 < score.low <= score.rate <= score.high
        assert score.peak_memory is None or score.peak_memory > 0
    assert {s.contestant for s in done.scores if s.peak_memory} >= {"tutorial", "hotloop"}


@pytest.mark.parametrize("name", END_TO_END)
def test_every_workload_is_timed_end_to_end(name: str, gpu: torch.device) -> None:
    needs_packages_of(name)
    done = run_end_to_end(WholeRuns((name,), (gpu,), lengths=(20.0,), tutorial=10.0, quick=True))
    assert done.failures == ()
    (row,) = done.end_to_end
    run = row.default(0.2)
    assert run is not None, row.failures
    assert run.peak_memory
    assert "careful" in row.peers
    if name in ("bert", "llama") and _installed("accelerate"):
        assert "trainer" in row.peers, row.failures


def test_no_expert_leaves_its_switches_on(gpu: torch.device) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    race(workload("mlp", gpu, quick=True), contestants(["expert"], experts=EXPERTS), gpu, repeats=1)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == before


def test_limits_rise_with_less_precision(gpu: torch.device) -> None:
    limits = ceilings(gpu)
    assert limits["bytes"] > 1e10
    if "bf16" in limits:
        assert limits["fp32"] < limits["tf32"] < limits["bf16"]


def _installed(package: str) -> bool:
    try:
        __import__(package)
    except ImportError:
        return False
    return True
