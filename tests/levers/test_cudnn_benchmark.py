"""cuDNN's search for algorithms: how many it tries, and when a run begins it."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.levers.cudnn_benchmark import CANDIDATES, CudnnBenchmarkLever, expected_search
from hotloop.plan import Plan


def pictures(count: int) -> list[Any]:
    torch.manual_seed(0)
    return [(torch.randn(256, 3, 32, 32), torch.randint(10, (256,)))] * count


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def test_what_a_search_may_take_grows_with_the_convolutions() -> None:
    assert expected_search(nn.Linear(3, 3)) == 0 < expected_search(network())


def test_no_search_pays_for_the_patches_of_a_transformer() -> None:
    assert expected_search(nn.Sequential(nn.Conv2d(3, 192, 16, stride=16), nn.Flatten(2), nn.Linear(196, 10))) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("own", "inside"), [(10, CANDIDATES), (7, 7), (0, 0)])
def test_few_candidates_are_tried_unless_the_person_wants_another_number(
    own: int, inside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudnn: Any = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark_limit", own)
    around = CudnnBenchmarkLever().around(Plan("cuda", cudnn_benchmark=True))
    with suppress(ZeroDivisionError), around:
        assert cudnn.benchmark_limit == inside
        raise ZeroDivisionError
    assert cudnn.benchmark_limit == own


@pytest.mark.gpu
@pytest.mark.parametrize("pays", [True, False])
def test_a_run_searches_where_that_pays_back_and_keeps_what_is_faster(
    pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.levers.cudnn_benchmark.EACH", 1e-9 if pays else 1e6)
    monkeypatch.setattr("hotloop.tune.course.HELD_UP", 0.03)
    model = network()
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.05), nn.CrossEntropyLoss())
    report = loop.fit(pictures(60), epochs=20, progress=False, monitor=False)
    assert (report.steps, loop.plan.precision) == (1200, "bf16"), str(loop.tuning)
    found = next(trial for trial in loop.tuning.trials if trial.lever == "cudnn benchmark")
    assert (found.verdict == "kept") == loop.plan.cudnn_benchmark
    if pays:
        assert found.verdict in ("kept", "dropped")
        assert "hold up" not in found.why
    else:
        assert found.verdict == "not tried"
        assert "would hold up" in found.why
    assert not torch.backends.cudnn.benchmark
