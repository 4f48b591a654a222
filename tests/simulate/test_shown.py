"""What a person reads of a simulation, in a terminal and on a page: the answer first, nothing lost, and text alone."""

import json
import re
import shutil
from collections.abc import Iterable
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

from hotloop.apps.simulate import simulation_plots
from hotloop.apps.simulate.largest_batch import SearchResult
from hotloop.apps.simulate.shown import (
    blocks,
    cards_table,
    ranked,
    simulation_page,
    simulation_run,
    simulation_words,
)
from hotloop.apps.simulate.simulation_plots import memory_plot
from hotloop.apps.simulate.simulation_record import (
    Band,
    Batch,
    Copy,
    DeviceFinding,
    Peak,
    PeakAt,
    Simulation,
    StepTime,
    Sync,
)
from hotloop.report.profile_page import profile_run
from hotloop.report.runs import DATA, PAGE, compared, kept_in, new_run, runs_list

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


def made(**changes: Any) -> Simulation:
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
        step_ms=StepTime(100.0, 80.0, 125.0, False),
        limited_by="launches",
        batch=Batch(32, "argument:--batch", 32),
        findings=(BUG,),
        copies=(Copy("train.py", 53, "to the device", 4096, False, False, 3),),
        syncs=(Sync("train.py", 60, "item", 2),),
        notes=("a note",),
    )
    return replace(simulation, **changes)


def said(parts: Iterable[Any]) -> str:
    console = Console(width=200, file=StringIO(), highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def words_of(found: Simulation) -> str:
    return " ".join(said(simulation_words(found, "train.py")).split())


def page_of(found: Simulation, script: str = "train.py", **options: Any) -> str:
    return simulation_page(found, script, date="2026-01-02T03:04:05+00:00", **options)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without pictures, which take seconds."""
    monkeypatch.setattr(simulation_plots, "memory_plot", lambda *_: b"")


COMMON = [
    "it fits: the process would take 7.0 GiB of 8.0 GiB at its peak",
    "a step takes 100 ms 80 ms to 125 ms; uncalibrated: this GPU was not measured",
    "samples per second 320 256 to 400",
    "limited by launches launching the operations takes the host longer than computing them",
    "allocated 5.0 GiB at the peak; 6.0 GiB reserved; the peak is at train.py:57, in backward of head",
]
BELOW = [
    "What would go wrong",
    "error, 3 times{} net.py:36: embedding: cpu and cuda",
    "fix{} move",
    "What the peak is made of",
    "the process 7.0 GiB 100.0%",
    "train.py:53 to the device, pageable the host waits 4.0 KiB 3 copies",
    "Where the host waits for the device",
    "train.py:60 item 2 times",
    "a note",
]


@pytest.mark.usefixtures("undrawn")
def test_a_terminal_and_a_page_answer_in_the_same_order() -> None:
    found = made()
    page = page_of(found, command="hotloop simulate train.py").partition("</style>")[2]
    shown = " ".join(unescape(re.sub(r"<[^>]+>", " ", page)).split())
    title = "train.py on NVIDIA GeForce RTX 3070, simulated for 3 steps"
    beside = [
        "Activations by module",
        "blocks.*.mlp 2.3 GiB",
        "outside any module",
        "How it was found",
        "hotloop simulate",
    ]
    for words, wanted in (
        (words_of(found), [title, *COMMON, *(each.format(":") for each in BELOW)]),
        (shown, [title, "Memory over the steps", *(each.format("") for each in BELOW), *beside]),
    ):
        places = [words.index(each) for each in wanted]
        assert places == sorted(places)
    for each in COMMON:
        assert each in shown
    assert "Every number on this page was predicted by a model in this run, 2026-01-02 03:04:05 UTC." in shown


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fits": None}, "too close to say whether it fits: the process would take 7.0 GiB of 8.0 GiB at its peak"),
        ({"fits": False}, "it does not fit: the process would take 7.0 GiB"),
        ({"findings": ()}, "no device bug was found"),
        ({"findings": (replace(BUG, confidence="suspected"),)}, "error, perhaps, 3 times: net.py:36"),
        ({"completed": 1}, "simulated for 1 step of the 3 asked for"),
        ({"status": "no-gpu", "peak": None}, "no verdict: the script never uses the GPU"),
        (
            {"search": SearchResult(96, 97, 6, "activations (12.0 GiB) at train.py:31", ())},
            "largest batch 96 97 does not fit; what fills the memory: activations (12.0 GiB) at train.py:31; 6 batches",
        ),
        ({"search": SearchResult(65536, None, 9, "", ())}, "largest batch at least 65,536 no larger one was tried"),
        ({"search": SearchResult(None, 1, 4, "", ())}, "largest batch not even 1 fits"),
        ({"search": SearchResult(None, None, 0, "", (), "why")}, "largest batch none was seen to fit"),
    ],
)
def test_the_answer_in_words(changes: dict[str, Any], words: str) -> None:
    assert words in words_of(made(**changes))


@pytest.mark.usefixtures("undrawn")
def test_what_is_unknown_is_left_out_and_a_failed_script_has_no_verdict() -> None:
    bare = Simulation("h200", 3, 0)
    ended = DeviceFinding("failed", "error", "shown", "a.py", 0, "", "the script failed: ValueError: no", "")
    failed = replace(bare, status="failed", findings=(ended,), error="Traceback…\nValueError: the script failed\n")
    for words in (Reader(page_of(bare)).text, words_of(bare)):
        assert "no device bug was found" in words
        for title in ("Memory over the steps", "What the peak is made of", "Copies", "Notes", "a step takes"):
            assert title not in words
    for words in (Reader(page_of(failed)).text, words_of(failed)):
        assert "no verdict: the script failed, so its memory and its speed are not known" in words
        assert "a.py: the script failed: ValueError: no" in words
        for title in ("it fits", "no device bug", "what ended it"):
            assert title not in words
    assert "failed" in said([cards_table([failed])])


def test_the_categories_make_up_the_process() -> None:
    rows = next(block for block in blocks(made()) if block.title == "What the peak is made of").rows
    names = ["activations", "parameters", "optimizer", "context", "cached by the allocator", "the process"]
    assert [row[:2] for row in rows] == [
        [name, amount] for name, amount in zip(names, ["3.0 GiB", *["1.0 GiB"] * 4, "7.0 GiB"], strict=True)
    ]


def test_cards_side_by_side_and_their_ranks() -> None:
    first = made(search=SearchResult(96, 97, 6, "", ()), findings=())
    short = made(gpu_name="\x1b[31mL4", fits=False, step_ms=None, search=SearchResult(None, 1, 3, "", ()), findings=())
    heading, one, other = said([cards_table([first, short])]).splitlines()
    assert [each in heading for each in ("largest batch", "samples/s", "findings")] == [True, True, False]
    assert "yes 7.0 GiB 96 100 ms* 320 (256 to 400)" in " ".join(one.split())
    assert " no " in other
    assert "\x1b" not in other
    alike = made(gpu_name="NVIDIA H200")
    assert "Too close to rank" in ranked([first, alike])
    quick = replace(alike, step_ms=StepTime(10.0, 9.0, 11.0, calibrated=True))
    assert "By speed: H200; then GeForce RTX 3070" in ranked([first, quick])
    assert ranked([short]) == ""


def with_names(name: str) -> Simulation:
    """A simulation in which everything that a script can choose is called so."""
    return made(
        peak_at=PeakAt(name, 1, name, name, name),
        categories={name: GIB},
        modules={name: GIB},
        findings=(DeviceFinding(name, name, name, name, 1, name, name, name, 2), replace(BUG, message=name, fix=name)),
        copies=(Copy(name, 1, name, 1, True, True, 1),),
        syncs=(Sync(name, 1, name, 1),),
        notes=(name,),
        gpu_name=name,
        error=name,
    )


@pytest.mark.usefixtures("undrawn")
@given(st.text(st.characters(), min_size=1))
@settings(max_examples=tries(15, 40), deadline=None)
def test_no_name_becomes_markup(name: str) -> None:
    page = page_of(with_names(name), name, command=name)
    assert {"script", "a", "iframe"}.isdisjoint(Reader(page).tags)
    page.encode()
    said(simulation_words(with_names(name), name))


def test_the_page_needs_nothing_from_elsewhere_and_shows_a_naughty_name_as_text() -> None:
    page = page_of(with_names(NAUGHTY), NAUGHTY, command=NAUGHTY)
    read = Reader(page)
    assert "script" not in read.tags
    assert read.text.count("<script>document.title='caught'</script>") >= 8
    assert not {"\x1b", "\u202e"} & set(page)
    assert "default-src 'none'" in page
    assert all(address.startswith("data:") for address in read.addresses)
    assert page.count("data:image/svg+xml") == 2  # by day and by night
    assert len(page) < 2_000_000


POINTS = st.lists(st.tuples(st.integers(0, 2**45), st.integers(0, 2**45)), min_size=1, max_size=9)


@given(POINTS, st.integers(1, 60), st.lists(st.integers(0, 700), max_size=30).map(sorted))
@settings(max_examples=tries(3, 8), deadline=None)
def test_any_curve_can_be_drawn(few: list[tuple[int, int]], times: int, ends: list[int]) -> None:
    points = [(number, *amounts) for number, amounts in enumerate(few * times)]
    bands = (Band("parameters", tuple(point[1] for point in points)),)
    found = made(timeline=tuple(points), bands=bands, step_ends=tuple(ends))
    assert ElementTree.fromstring(memory_plot(found, "svg")).tag.endswith("svg")  # noqa: S314  # our own


@pytest.mark.usefixtures("undrawn")
def test_simulations_are_listed_and_compared_also_with_what_was_measured(tmp_path: Path) -> None:
    for name, found in (("before", made()), ("after", made(findings=(), step_ms=StepTime(50.0, 40.0, 60.0, False)))):
        with new_run(tmp_path / name) as run:
            entry = simulation_run(found, "train.py", "2026-01-02T03:04:05+00:00")
            run.write(PAGE, page_of(found))
            run.write_json(DATA, entry.with_data({"simulation": found.to_json()}))
    runs, failed = kept_in(tmp_path)
    assert not failed
    words = said([runs_list(runs)])
    assert "simulate: train.py" in words
    assert "NVIDIA GeForce RTX 3070, simulated" in words
    kept = {each.folder.name: each.run for each in runs}
    rows = {name: (a, b, better) for name, a, b, _, better in compared(kept["before"], kept["after"])}
    assert rows["median step in seconds"] == ("100 ms", "50 ms", True)
    assert rows["findings"][2] is True, "fewer are better"
    back = json.loads((tmp_path / "before" / DATA).read_text())["simulation"]
    assert Simulation.from_json(back) == made()
    shared = set(kept["before"].figures) & set(profile_run(made_profile("cuda:0")).figures)
    assert {"median step in seconds", "peak memory in bytes"} <= shared


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium (`apt install chromium`)")
def test_in_a_browser_it_fits_the_window_and_runs_nothing(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (`pip install playwright`)")
    plain, naughty = tmp_path / "plain.html", tmp_path / "naughty.html"
    plain.write_text(page_of(made(), command="hotloop simulate train.py"))
    naughty.write_text(page_of(with_names(NAUGHTY), NAUGHTY))
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
