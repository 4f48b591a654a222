"""Memory over time, from plain data and nothing else."""

import copy
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rcParams
from PIL import Image

from hotloop.report.memory_page import peak_words, timeline, timeline_picture
from hotloop.report.plots import DARK

MIB = 2**20


def made() -> dict[str, Any]:
    """A step that peaks in the backward pass, as JSON gives it back."""
    phases = ["between"] * 2 + ["forward"] * 20 + ["backward"] * 20 + ["optimizer"] * 8
    heights = [50, 60, *range(80, 380, 15), 412, *range(400, 210, -10), *[210] * 8]
    points = [[0.001 * i, height * MIB, phase] for i, (height, phase) in enumerate(zip(heights, phases, strict=True))]
    return {
        "device": "cuda:0",
        "peak": 412 * MIB,
        "at": {
            "seconds": 0.022,
            "phase": "backward",
            "module": "blocks.3",
            "operation": "aten.mm.default",
            "line": "train.py:31: loss.backward()",
        },
        "phases": {"between": 60 * MIB, "forward": 365 * MIB, "backward": 412 * MIB, "optimizer": 210 * MIB},
        "modules": [
            {"name": f"blocks.{i}", "kind": "Block", "forward_peak": 30 * MIB, "saved": (i + 1) * MIB, "own_new": 7}
            for i in range(4)
        ],
        "kept": {"activations": 290 * MIB, "inputs": 5 * MIB, "parameters": 40 * MIB},
        "timeline": points,
        "allocator": {"between": 64 * MIB, "forward": 370 * MIB, "backward": 450 * MIB, "optimizer": 230 * MIB},
    }


def changed(**values: Any) -> dict[str, Any]:
    return {**made(), **values}


OUTSIDE = {**made()["at"], "module": "", "line": None}
LONG = {**made()["at"], "module": "a\x1b[2J block_$x^{2}$." * 40, "line": "x $y_1$ = 1 " * 50}
MANY = [[i, i % 7 * MIB, ("forward", "backward")[i % 2]] for i in range(40)]
ODD = {
    "nothing": changed(timeline=[], peak=0, phases={}, modules=[]),
    "no bytes": changed(timeline=[[0.0, 0, "between"], [1.0, 0, "forward"]], peak=0),
    "one point, outside any module": changed(timeline=[[0.0, MIB, "between"]], at=OUTSIDE),
    "tiny, in a phase nobody knows": changed(timeline=[[0.0, 3, "between"], [1e-6, 7, "elsewhere"]], peak=7),
    "huge": changed(timeline=[[0.0, 2**40, "between"], [4000.0, 2**42, "forward"]], peak=2**42),
    "many steps, long names that steer": changed(timeline=MANY, at=LONG),
}


def size_of(png: bytes) -> tuple[int, int]:
    with Image.open(BytesIO(png)) as image:
        image.load()
        return image.size


def test_the_title_says_the_finding() -> None:
    assert peak_words(made()) == "peak 412.0 MiB in backward of blocks.3"
    assert peak_words(changed(at=OUTSIDE)) == "peak 412.0 MiB in backward, outside any module"
    for phase, words in (("between", "between the steps"), ("optimizer", "in the optimizer")):
        assert peak_words(changed(at={**made()["at"], "phase": phase})).endswith(words)


def test_a_picture_is_written_whole_as_png_or_svg(tmp_path: Path) -> None:
    data = json.loads(json.dumps(made()))
    timeline(data, tmp_path / "memory.png")
    assert size_of((tmp_path / "memory.png").read_bytes())[0] == 1800
    timeline(data, str(tmp_path / "memory.svg"))
    assert b"<svg" in (tmp_path / "memory.svg").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory.png", "memory.svg"]


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
def test_odd_data_still_gives_a_picture(data: dict[str, Any]) -> None:
    before = copy.deepcopy(data)
    assert size_of(timeline_picture(data))[0] == 1800
    assert data == before


def test_the_same_data_gives_the_same_picture_with_its_phases_the_place_of_the_peak_and_the_theme() -> None:
    before = dict(rcParams)
    other = changed(timeline=[[at, live, "forward"] for at, live, _ in made()["timeline"]])
    elsewhere = changed(at={**made()["at"], "module": "head"})
    picture = timeline_picture(made())
    assert timeline_picture(made()) == picture
    assert len({picture, *map(timeline_picture, (other, elsewhere)), timeline_picture(made(), theme=DARK)}) == 4
    assert dict(rcParams) == before
