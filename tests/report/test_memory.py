"""Memory over time, by module and by phase, from plain data and nothing else."""

import copy
import json
import re
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rcParams
from PIL import Image
from rich.console import Console
from rich.table import Table

from hotloop.report.memory import memory_table, peak_words, phases_table, timeline, timeline_picture
from hotloop.report.plots import DARK

MIB = 2**20


def made(modules: int = 4) -> dict[str, Any]:
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
            for i in range(modules)
        ],
        "kept": {"activations": 290 * MIB, "inputs": 5 * MIB, "parameters": 40 * MIB},
        "timeline": points,
        "allocator": {"between": 64 * MIB, "forward": 370 * MIB, "backward": 450 * MIB, "optimizer": 230 * MIB},
    }


def changed(**values: Any) -> dict[str, Any]:
    return {**made(), **values}


ODD = {
    "nothing": changed(timeline=[], peak=0, phases={}, modules=[]),
    "one point": changed(timeline=[[0.0, MIB, "between"]]),
    "no bytes": changed(timeline=[[0.0, 0, "between"], [1.0, 0, "forward"]], peak=0),
    "tiny": changed(timeline=[[0.0, 3, "between"], [1e-6, 7, "forward"]], peak=7),
    "huge": changed(timeline=[[0.0, 2**40, "between"], [4000.0, 2**42, "forward"]], peak=2**42),
    "many steps": changed(timeline=[[i, i % 7 * MIB, ("forward", "backward")[i % 2]] for i in range(400)]),
    "a phase nobody knows": changed(timeline=[[0.0, MIB, "between"], [1.0, 412 * MIB, "elsewhere"]]),
    "outside": changed(at={**made()["at"], "module": "", "line": None}),
    "long names": changed(at={**made()["at"], "module": "block_$x^{2}$." * 40, "line": "x $y_1$ = 1 " * 50}),
    "steers": changed(at={**made()["at"], "module": "a\x1b[2J"}),
}


def shown(table: Table, width: int = 80) -> str:
    file = StringIO()
    Console(width=width, file=file, no_color=True, highlight=False).print(table)
    return file.getvalue()


def size_of(png: bytes) -> tuple[int, int]:
    with Image.open(BytesIO(png)) as image:
        image.load()
        return image.size


def test_the_title_says_the_finding() -> None:
    assert peak_words(made()) == "peak 412.0 MiB in backward of blocks.3"
    assert peak_words(ODD["outside"]) == "peak 412.0 MiB in backward, outside any module"
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
def test_odd_data_still_gives_a_picture_and_tables(data: dict[str, Any]) -> None:
    before = copy.deepcopy(data)
    assert size_of(timeline_picture(data))[0] == 1800
    for table in (memory_table(data), phases_table(data)):
        text = shown(table)
        assert max(map(len, text.splitlines())) <= 80
        assert "\x1b" not in text
    assert data == before


def test_the_same_data_gives_the_same_picture_and_no_global_setting_changes() -> None:
    before = dict(rcParams)
    assert timeline_picture(made()) == timeline_picture(made())
    assert timeline_picture(made()) != timeline_picture(made(), theme=DARK)
    assert dict(rcParams) == before


def test_phases_and_the_place_of_the_peak_show_in_the_picture() -> None:
    other = changed(timeline=[[at, live, "forward"] for at, live, _ in made()["timeline"]])
    elsewhere = changed(at={**made()["at"], "module": "head"})
    assert len({timeline_picture(data) for data in (made(), other, elsewhere)}) == 3


def test_the_largest_modules_come_first_and_the_rest_is_summed() -> None:
    text = shown(memory_table(made(modules=20)))
    named = re.findall(r"blocks\.(\d+)", text)
    assert named == [str(i) for i in range(19, 4, -1)]
    assert "5 more" in text
    rest = next(line for line in text.splitlines() if "5 more" in line)
    assert f"{sum(range(1, 6))}.0 MiB" in rest
    whole = next(line for line in text.splitlines() if line.strip().startswith("all"))
    assert f"{sum(range(1, 21))}.0 MiB" in whole
    assert "5.0 MiB of inputs and 40.0 MiB of parameters" in text


def test_what_no_module_kept_has_a_line_too() -> None:
    outside = {"name": "", "kind": "", "forward_peak": 0, "saved": 99 * MIB, "own_new": 1}
    text = shown(memory_table(changed(modules=[*made()["modules"], outside])))
    assert "99.0 MiB" in next(line for line in text.splitlines() if "outside any module" in line)


def test_phases_are_in_the_order_of_a_step_with_the_figures_of_the_allocator() -> None:
    text = shown(phases_table(made()))
    rows = [line.split()[0] for line in text.splitlines() if re.match(r"\s*(between|forward|backward|optim)", line)]
    assert rows == ["between", "forward", "backward", "optimizer"]
    assert "450.0 MiB" in next(line for line in text.splitlines() if "backward" in line)
    assert "allocator" not in shown(phases_table(changed(allocator=None)))
    assert "unknown" in shown(phases_table(changed(allocator={})))


def test_names_from_outside_cannot_steer_the_terminal_nor_be_read_as_markup() -> None:
    odd = {"name": "[red]x\x1b[2J", "kind": "[/]", "forward_peak": 1, "saved": 1, "own_new": 1}
    text = shown(memory_table(changed(modules=[odd])))
    assert "\x1b" not in text
    assert "[red]x" in text
    assert "[/]" in text
