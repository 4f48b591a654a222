"""The page of a simulation: the answer first, nothing lost, and nothing from outside but text."""

import json
import re
import shutil
from dataclasses import replace
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hotloop.apps.simulate import simulation_page as module
from hotloop.apps.simulate.largest_batch import Variant
from hotloop.apps.simulate.simulation_page import categories_table, lead, modules_table, simulation_page, simulation_run
from hotloop.apps.simulate.simulation_plots import far_above, peak_line, steps_plot
from hotloop.apps.simulate.simulation_record import (
    Band,
    Copy,
    DeviceFinding,
    Peak,
    PeakAt,
    Simulation,
    StepPace,
    StepTime,
    Sync,
)
from hotloop.report.plots import DARK, LIGHT
from hotloop.report.profile_page import profile_run
from hotloop.report.run_folder import new_run
from hotloop.report.runs import DATA, PAGE, compared, kept_in, runs_list

from ..report.profiles import made_profile
from ..report.reading import Reader
from ..thorough import tries

GIB = 2**30
NAUGHTY = (
    "<script>document.title='caught'</script><img src=x onerror=\"document.title='caught'\">\x1b[31m\u202e$x$\udcff訓練"
)
BUG = DeviceFinding(
    "made-on-cpu", "error", "shown", "net.py", 36, "forward", "embedding: cpu and cuda\n  input: cpu", "move", 3
)


def made(**changes: Any) -> dict[str, Any]:
    """Three steps that take 6 GiB at their peak, of 8."""
    held = {
        "context": (GIB,) * 30,
        "parameters": (GIB,) * 30,
        "activations": tuple(GIB * (each % 10) // 3 for each in range(30)),
        "optimizer": (0,) * 10 + (GIB,) * 20,
    }
    total = [sum(held[name][each] for name in held if name != "context") for each in range(30)]
    simulation = Simulation(
        gpu="rtx3070",
        gpu_name="NVIDIA GeForce RTX 3070",
        gpu_memory=8 * GIB,
        steps=3,
        completed=3,
        peak=Peak(5 * GIB, 6 * GIB, 7 * GIB),
        peak_at=PeakAt("train.py", 57, "main", "backward", "head"),
        categories={"parameters": GIB, "activations": 3 * GIB, "optimizer": GIB, "context": GIB},
        modules={f"blocks.{n}.mlp": 200 << 20 for n in range(12)} | {"head": 300 << 20, "": 100 << 20},
        timeline=tuple((each, amount, 6 * GIB) for each, amount in enumerate(total)),
        bands=tuple(Band(name, amounts) for name, amounts in held.items()),
        step_ends=(9, 19, 29),
        fits=True,
        step_ms=StepTime(188.0, 150.0, 239.0, False),
        findings=(BUG,),
        copies=(Copy("train.py", 53, "to the device", 4096, False, False, 3),),
        syncs=(Sync("train.py", 60, "item", 2),),
        notes=("a note",),
    )
    return replace(simulation, **changes).to_json()


def page_of(data: dict[str, Any], **options: Any) -> str:
    return simulation_page(data, **{"script": "train.py", "date": "2026-01-02T03:04:05+00:00", **options})


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without pictures, which take seconds."""
    monkeypatch.setattr(module, "steps_plot", lambda *_: b"")


@pytest.mark.usefixtures("undrawn")
def test_the_page_answers_in_order() -> None:
    page = page_of(made(), command="hotloop simulate train.py").partition("</style>")[2]
    said = " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())
    wanted = [
        "train.py on NVIDIA GeForce RTX 3070, simulated",
        "train.py fits on NVIDIA GeForce RTX 3070: at its peak the process would take 7.0 GiB of its 8.0 GiB.",
        "A step would take 188 ms, most likely between 150 ms and 239 ms; this GPU was not measured",
        "Found: 1 error. On the GPU, the script would end at the first error.",
        "Memory over the steps",
        "The peak is in backward of head, at train.py:57.",
        "What the peak is made of",
        "Activations by module",
        "What would go wrong",
        "error, 3 times net.py:36: embedding: cpu and cuda input: cpu",
        "fix move",
        "Copies",
        "train.py:53 to the device, pageable; the host waits 4.0 KiB 3",
        "Where the host waits for the device",
        "train.py:60 item 2",
        "a note",
        "How it was found",
        "hotloop simulate train.py",
    ]
    places = [said.index(words) for words in wanted]
    assert places == sorted(places)


@pytest.mark.usefixtures("undrawn")
def test_nothing_is_said_to_be_measured() -> None:
    page = page_of(made(notes=("something was measured",)))
    assert "Every number on this page was predicted by a model in this run, 2026-01-02 03:04:05 UTC." in page
    assert "something was measured" in page


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fits": None}, "Whether train.py fits on NVIDIA GeForce RTX 3070 is too close to say"),
        ({"fits": False}, "does not fit on NVIDIA GeForce RTX 3070: memory runs out when the process holds 7.0 GiB of"),
        (
            {"fits": False, "peak": Peak(GIB, 9 * GIB, 10 * GIB)},
            "does not fit on NVIDIA GeForce RTX 3070: the process would need 10.0 GiB, where 8.0 GiB are.",
        ),
        ({"peak": None}, "train.py was run on a simulated NVIDIA GeForce RTX 3070."),
        ({"step_ms": StepTime(2000.0, 1500.0, 2500.0, True)}, "between 1.50 s and 2.50 s."),
        ({"largest_batch": 1024}, "The largest batch that fits is 1,024."),
        ({"findings": ()}, "No device bug was found."),
        ({"findings": (replace(BUG, level="warning"), replace(BUG, level="info"))}, "Found: 1 warning, 1 hint."),
        ({"gpu_name": ""}, "on rtx3070"),
    ],
)
def test_the_answer_in_a_few_sentences(changes: dict[str, Any], said: str) -> None:
    assert said in lead(made(**changes), "train.py")


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_ended_early_says_so() -> None:
    early = Reader(page_of(made(completed=1))).text
    assert "Only 1 of 3 steps ran." in early
    error = "Traceback (most recent call last):\n  File 'train.py', line 1\nValueError: the reason\n"
    failed = Reader(page_of(made(completed=0, error=error))).text
    assert "The script ended with an error after 0 of 3 steps." in failed
    assert "ValueError: the reason" in failed
    told = made(completed=0, error=f"RuntimeError: {BUG.message}")
    assert "what ended it" not in Reader(page_of(told)).text, "a finding says it already"


@pytest.mark.usefixtures("undrawn")
def test_what_would_make_room_is_told_beside_the_script_as_it_is() -> None:
    plain, smaller = Variant("plain", "as it is", 7 * GIB, 16, 188.0), Variant("bf16", "autocast to bf16", 5 * GIB)
    page = page_of(made(helps=(plain, smaller)))
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page.partition("What would make room")[2])
    assert cells[:8] == ["as it is", "7.0 GiB", "16", "188 ms", "autocast to bf16", "5.0 GiB", "–", "–"]
    assert "What would make room" not in page_of(made(helps=(plain,)))


@pytest.mark.usefixtures("undrawn")
def test_what_is_unknown_is_left_out() -> None:
    page = Reader(page_of(Simulation("h200", 3, 0).to_json())).text
    assert "No device bug was found" in page
    for title in ("Memory over the steps", "What the peak is made of", "Copies", "Notes", "does it fit?"):
        assert title not in page


def test_the_categories_make_up_the_process() -> None:
    rows = categories_table(made())
    assert [row[0] for row in rows] == [
        "activations",
        "parameters",
        "optimizer",
        "context",
        "held in reserve",
        "the process",
    ]
    assert [row[2] for row in rows] == ["3.0 GiB", "1.0 GiB", "1.0 GiB", "1.0 GiB", "1.0 GiB", "7.0 GiB"]
    assert rows[-1][3] == "100.0%"


def test_layers_of_one_kind_are_counted_together() -> None:
    rows = modules_table(made())
    assert rows[0] == ["blocks.*.mlp", "12", "2.3 GiB", "85.7%"]
    assert rows[2][0] == "outside any module"
    assert modules_table({"modules": {"0": 2, "1": 1}}) == [["0", "1", "2 B", "66.7%"], ["1", "1", "1 B", "33.3%"]]


NAMES = st.text(st.sampled_from("ab01."), max_size=8)


@given(st.dictionaries(NAMES, st.integers(1, 10**12), max_size=60))
def test_no_module_is_lost(modules: dict[str, int]) -> None:
    rows = modules_table({"modules": modules})
    assert sum(int(row[1]) for row in rows) == len(modules)
    assert len(rows) <= module.LINES_SHOWN + 1


def with_names(name: str) -> dict[str, Any]:
    """A simulation in which everything that a script can choose is called so."""
    return made(
        peak_at=PeakAt(name, 1, name, name, name),
        categories={name: GIB},
        modules={name: GIB},
        bands=(Band(name, (GIB,) * 30),),
        findings=(DeviceFinding(name, name, name, name, 1, name, name, name, 2), replace(BUG, message=name, fix=name)),
        copies=(Copy(name, 1, name, 1, True, True, 1),),
        syncs=(Sync(name, 1, name, 1),),
        notes=(name,),
        helps=(Variant(name, name, 1), Variant(name, name, None)),
        gpu_name=name,
        error=name,
    )


@pytest.mark.usefixtures("undrawn")
@given(st.text(st.characters(), min_size=1))
@settings(max_examples=tries(15, 40), deadline=None)
def test_no_name_becomes_markup(name: str) -> None:
    read = Reader(page_of(with_names(name), script=name, command=name))
    assert {"script", "a", "iframe"}.isdisjoint(read.tags)
    page_of(with_names(name), script=name).encode()


def test_a_naughty_name_is_drawn_and_shown_as_text() -> None:
    page = page_of(with_names(NAUGHTY), script=NAUGHTY, command=NAUGHTY)
    read = Reader(page)
    assert "script" not in read.tags
    assert read.text.count("<script>document.title='caught'</script>") >= 10
    assert not {"\x1b", "\u202e"} & set(page)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = page_of(made())
    assert "default-src 'none'" in page
    assert all(address.startswith("data:") for address in Reader(page).addresses)
    assert page.count("data:image/svg+xml") == 4  # wide and narrow, by day and by night
    assert len(page) < 2_000_000


POINTS = st.lists(st.tuples(st.integers(0, 2**45), st.integers(0, 2**45)), min_size=1, max_size=9)


@given(POINTS, st.integers(1, 60), st.lists(st.integers(0, 700), max_size=30).map(sorted), st.booleans())
@settings(max_examples=tries(3, 8), deadline=None)
def test_any_curve_can_be_drawn(few: list[tuple[int, int]], times: int, ends: list[int], narrow: bool) -> None:
    points = few * times
    timeline = [(number, *amounts) for number, amounts in enumerate(points)]
    data = {"timeline": timeline, "step_ends": ends, "peak": {"allocated": 1}, "gpu_memory": 2**34}
    assert ElementTree.fromstring(steps_plot(data, "svg", LIGHT, narrow)).tag.endswith("svg")  # noqa: S314  # our own


def test_nothing_is_drawn_as_nothing() -> None:
    assert steps_plot({}, "svg", DARK)


@pytest.mark.usefixtures("undrawn")
def test_a_card_that_is_far_above_is_left_out_of_the_picture_and_told() -> None:
    assert not far_above(made())
    large = made(gpu_memory=141 * GIB)
    assert far_above(large)
    assert steps_plot(large, "svg", LIGHT)
    assert "The 141.0 GiB of the card lie far above the picture." in page_of(large)
    assert not far_above({})


def test_names_that_a_picture_cannot_draw_stay_out_of_it() -> None:
    place = {"peak_at": {"file": "訓練.py", "line": 7, "phase": "forward", "module": "頭"}}
    assert peak_line(place, 80) == "in forward of 頭, at 訓練.py:7"
    assert peak_line(place, 80, drawn=True) == "in forward, at line 7"
    assert peak_line({}, 80) == ""


@pytest.mark.usefixtures("undrawn")
def test_simulations_are_listed_and_compared(tmp_path: Path) -> None:
    for name, data in (("before", made()), ("after", made(findings=(), step_ms=StepTime(94.0, 80.0, 110.0, False)))):
        with new_run(tmp_path / name) as run:
            entry = simulation_run(data, script="train.py", date="2026-01-02T03:04:05+00:00")
            run.write(PAGE, page_of(data))
            run.write_json(DATA, entry.with_data({"simulation": data}))
    runs, failed = kept_in(tmp_path)
    assert not failed
    file = StringIO()
    Console(width=200, file=file, highlight=False).print(runs_list(runs))
    assert "simulate: train.py" in file.getvalue()
    assert "NVIDIA GeForce RTX 3070, simulated" in file.getvalue()
    kept = {each.folder.name: each.run for each in runs}
    rows = {name: (a, b, better) for name, a, b, _, better in compared(kept["before"], kept["after"])}
    assert rows["median step in seconds"] == ("188 ms", "94 ms", True)
    assert rows["findings"][2] is True, "fewer are better"
    back = json.loads((tmp_path / "before" / DATA).read_text())["simulation"]
    assert Simulation.from_json(back).to_json() == made()


def test_a_prediction_can_be_put_beside_what_was_measured() -> None:
    predicted = simulation_run(made(), script="train.py", date="")
    assert {"median step in seconds", "peak memory in bytes"} <= set(predicted.figures) & set(
        profile_run(made_profile("cuda:0")).figures
    )


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium (`apt install chromium`)")
def test_in_a_browser_it_fits_the_window_and_runs_nothing(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (`pip install playwright`)")
    plain, naughty = tmp_path / "plain.html", tmp_path / "naughty.html"
    plain.write_text(page_of(made(), command="hotloop simulate train.py"))
    naughty.write_text(page_of(with_names(NAUGHTY), script=NAUGHTY))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(color_scheme="dark")
        for width in (390, 1180):
            page.set_viewport_size({"width": width, "height": 900})
            page.goto(plain.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
        page.goto(naughty.as_uri())
        assert page.title().startswith("<script>document.title")
        assert page.locator("h1").inner_text().startswith("<script>document.title")
        browser.close()


@pytest.mark.parametrize(("status", "words"), [("failed", "failed"), ("no-gpu", "never uses the GPU")])
def test_a_script_that_did_not_train_has_a_page_without_a_verdict(status: str, words: str) -> None:
    ended = DeviceFinding(status, "error", "shown", "train.py", 12, "main", "the script failed: ValueError: no", "")
    failed = Simulation("t4", 3, 0, status, findings=(ended,), error="Traceback…\nValueError: no\n").to_json()
    page = simulation_page(failed, script="train.py")
    assert f"There is no verdict: train.py {words} on a simulated t4" in page
    assert "train.py:12: the script failed: ValueError: no" in page
    for said in ("fits on", "does it fit?", "A step would take", "No device bug"):
        assert said not in page


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_what_a_person_waits_for_beside_the_step() -> None:
    pace = StepPace(StepTime(250.0, 200.0, 300.0, calibrated=True), 240.0, 0.0, 2, "data")
    page = unescape(simulation_page(made(pace=pace), script="train.py"))
    assert "Batches and the script's own work on the host, measured here, make that 250 ms (200 ms to 300 ms)." in page
    assert "The data limits the pace" in page
    assert "data 240 ms by 2 workers" in page
    assert "with data and host work" not in simulation_page(made(), script="train.py")
