"""On a CUDA GPU: every contestant trains, and every expert's graphs do what the loop without them does."""

import pytest
import torch

from hotloop.bench.ceilings import ceilings
from hotloop.bench.contestants import NAMES, contestants
from hotloop.bench.running import race
from hotloop.bench.workloads import WORKLOADS, workload

from .racing import EXPERTS, loss_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning", "lightning": "lightning", "gpt2": "transformers"}


@pytest.fixture
def gpu() -> torch.device:
    return torch.device("cuda", 0)


@pytest.mark.parametrize("name", WORKLOADS)
def test_an_experts_loss_goes_down_through_its_graphs(name: str, gpu: torch.device) -> None:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    work = workload(name, gpu, quick=True)
    parts = work.parts()
    before = loss_of(work, parts)
    run = contestants(["expert"], experts=EXPERTS)["expert"](parts, gpu).run
    assert run(4) > 0
    parts.model.cpu()
    assert loss_of(work, parts) < before


@pytest.mark.parametrize("name", ["mlp", "cnn", "sprites", "gpt"])
def test_everyone_is_scored(name: str, gpu: torch.device) -> None:
    names = [each for each in NAMES if each not in PACKAGES or _installed(PACKAGES[each])]
    done = race(workload(name, gpu, quick=True), contestants(names, experts=EXPERTS, plan_for=60), gpu, repeats=2)
    assert done.failures == []
    assert [score.contestant for score in done.scores] == names
    for score in done.scores:
        assert 0 < score.low <= score.rate <= score.high
        assert score.peak_memory is None or score.peak_memory > 0
    assert {s.contestant for s in done.scores if s.peak_memory} >= {"tutorial", "hotloop"}


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
