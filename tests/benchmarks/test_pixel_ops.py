"""The benchmark of the pixel operations runs, says what it ran on, and refuses to time what is wrong."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from hotloop.records import Timing

from ..warm import Warm
from .conftest import BENCHMARKS, Import


@pytest.fixture
def pixel_ops(benchmark: Import) -> Any:
    return benchmark("pixel_ops")


def test_it_runs_and_writes_what_it_found(tmp_path: Path, warm: Warm) -> None:
    ran = warm.run(BENCHMARKS / "pixel_ops.py", "--quick", "--json", tmp_path / "new" / "r.json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "64 sprites of 16x16" in ran.stdout
    written = json.loads((tmp_path / "new" / "r.json").read_text())
    assert written["command"].endswith(f"pixel_ops.py --quick --json {tmp_path / 'new' / 'r.json'}")
    assert {"date", "commit", "cpu", "threads", "cores_taken_by_others", "gpu", "versions"} <= set(written)
    names = {each["operation"].split()[0] for each in written["results"]}
    assert names == {
        "look_up", "nearest_colour", "dither", "flip", "rotate", "outline", "shift_hue", "upscale", "contact_sheet",
    }  # fmt: skip
    for each in written["results"]:
        assert each["operation"] in ran.stdout
        batch = Timing.from_json(each["batch"])
        assert each["times_faster_than_loop"] == pytest.approx(each["loop_scaled"] / batch.median)
        assert (each["pillow"] is None) == (each["operation"] in {"dither", "outline"})


def test_every_way_agrees(pixel_ops: Any) -> None:
    for operation in pixel_ops.OPERATIONS:
        pixel_ops.check(operation, pixel_ops.inputs(6), "cpu")


def test_what_differs_is_not_timed(pixel_ops: Any) -> None:
    flip = next(operation for operation in pixel_ops.OPERATIONS if operation.name == "flip")
    unlike_the_loop = dataclasses.replace(flip, batch=lambda i: i.pixels)
    with pytest.raises(SystemExit, match="flip on cpu differs from the loop"):
        pixel_ops.check(unlike_the_loop, pixel_ops.inputs(6), "cpu")
    rotate = next(operation for operation in pixel_ops.OPERATIONS if operation.name == "rotate")
    unlike_pillow = dataclasses.replace(flip, pillow=rotate.pillow)
    with pytest.raises(SystemExit, match="flip on cpu differs from Pillow"):
        pixel_ops.check(unlike_pillow, pixel_ops.inputs(6), "cpu")
