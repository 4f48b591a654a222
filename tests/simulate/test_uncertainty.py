"""How sure a predicted peak is: near measurements make it narrow, far ones and unknown operations make it wide."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotloop.apps.simulate.cards import card
from hotloop.apps.simulate.events import Operation, Shape
from hotloop.apps.simulate.memory import MemoryListener
from hotloop.apps.simulate.shown import verdict
from hotloop.apps.simulate.simulation_record import PeakInterval, Simulation
from hotloop.apps.simulate.study import Study
from hotloop.placement.sites import Site

GIB = 2**30
SCRIPT = """
import sys
import torch
from torch import nn
torch.backends.cudnn.allow_tf32 = "tf32" in sys.argv
model = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
    nn.Conv2d(64, 192, 3, padding=1), nn.ReLU(), nn.Conv2d(192, 64, 3, padding=1), nn.Conv2d(64, 1, 1),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(16, 3, 128, 128).cuda()).square().mean().backward()
    optimizer.step()
"""


def width(interval: PeakInterval) -> float:
    return interval.high.allocated / interval.low.allocated - 1


@pytest.fixture(scope="module")
def told(simulator: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A script whose convolutions are in the tables, and the same in true fp32, of which these have 24 alone."""
    path = tmp_path_factory.mktemp("unsure") / "train.py"
    path.write_text(SCRIPT)
    study = {way: Study(simulator, path, [way], steps=2) for way in ("tf32", "fp32")}
    return {"study": study, **{way: each.plain(card("h200")) for way, each in study.items()}}


def test_far_from_any_measurement_the_interval_is_wide(told: dict[str, Any]) -> None:
    near, far = told["tf32"], told["fp32"]
    assert width(near.interval) < 0.09
    assert near.interval.reasons == ()
    assert width(far.interval) > 0.3
    assert far.interval.low.allocated < far.peak.allocated < far.interval.high.allocated
    assert far.interval.low.reserved < far.peak.reserved < far.interval.high.reserved
    assert "convolution workspace at train.py:" in far.interval.reasons[0]
    assert set(far.interval.reasons) <= set(far.notes)
    assert Simulation.from_json(far.to_json()) == far


def test_what_lies_inside_the_interval_is_too_close_to_say(told: dict[str, Any]) -> None:
    study, far = told["study"]["fp32"], told["fp32"]
    context = far.peak.process - far.peak.reserved
    cases = {
        far.interval.high.process + GIB: (True, "it fits: "),
        (far.peak.allocated + far.interval.high.allocated) // 2 + context: (None, "too close to say whether it fits: "),
        far.interval.low.allocated // 2 + context: (False, "it does not fit: "),
    }
    for memory, (fits, words) in cases.items():
        found = study.plain(replace(card("h200"), memory=memory), silent=True)
        assert found.fits is fits
        line = verdict(found)
        assert line.startswith(words)
        assert " GiB to " in line or " MiB to " in line
        assert any(finding.level == "error" for finding in found.findings) is (fits is False)


def test_one_that_just_runs_out_is_too_close_to_say(simulator: Any, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\n"
        "model = torch.nn.Linear(8192, 8192).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.randn(8, 8192).cuda()).sum().backward()\n"
        "optimizer.step()\n"
    )
    study = Study(simulator, path, [], steps=1)
    peak = study.plain(card("h200")).peak
    for share, fits, levels in ((1.1, True, set()), (0.99, None, {"warning"}), (0.9, False, {"error"})):
        memory = int(share * peak.allocated) + peak.process - peak.reserved
        found = study.plain(replace(card("h200"), memory=memory), silent=True)
        assert (found.fits, found.gpu_memory) == (fits, memory)
        assert {each.level for each in found.findings} == levels


@pytest.mark.parametrize(
    ("name", "dtype", "known"),
    [
        ("aten.relu.default", "float32", True),  # works on elements
        ("aten._log_softmax.default", "bfloat16", True),  # ran in trainings that were measured
        ("aten.sort.default", "float32", True),  # there is a rule for it
        ("aten.kthvalue.default", "float32", False),
        ("other.scan.default", "float32", False),
    ],
)
def test_an_operation_that_nobody_measured_makes_the_interval_wide(name: str, dtype: str, known: bool) -> None:
    memory = MemoryListener(card("h200"))
    memory.allocated(1, GIB, "activation")
    shape = Shape((GIB // 4 // 4,), dtype, 4)
    what = Operation(name, (shape,), (shape,), {}, "forward", "block", Site("train.py", 7))
    memory.before(what)
    memory.allocated(2, shape.nbytes, "activation")
    memory.after(what)
    interval = memory.interval
    assert (width(interval) < 0.09) is known
    if not known:
        assert interval.low.allocated < interval.high.allocated - shape.nbytes
        assert name.split(".")[1] in interval.reasons[0]
        assert "train.py:7 (block)" in interval.reasons[0]


def test_a_doubt_far_below_the_peak_widens_nothing() -> None:
    memory = MemoryListener(card("h200"))
    shape = Shape((2**20,), "float32", 4)
    memory.before(Operation("aten.kthvalue.default", (shape,), (shape,)))
    memory.after(Operation("aten.kthvalue.default", (shape,), (shape,)))
    memory.allocated(1, GIB, "activation")
    assert width(memory.interval) < 0.07
    assert memory.interval.reasons == ()
