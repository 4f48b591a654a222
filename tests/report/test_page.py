"""The page: complete, self-contained, and never fooled by what it is given."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.records import Report
from hotloop.report import page as module
from hotloop.report.document import Gallery, Picture, data_uri
from hotloop.report.page import Training
from hotloop.report.page import page as page_of

from .reading import Reader
from .reports import made_report


def page(report: Report, pictures: Sequence[Picture] = (), **words: Any) -> str:
    """A page of one training with one gallery."""
    return page_of([Training("", report)], galleries=[Gallery("Pictures", pictures)] if pictures else [], **words)


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time of a page, and is tested elsewhere."""
    monkeypatch.setattr(module, "loss_curve", lambda *args, **kwargs: b"<svg/>")


def test_everything_that_was_measured_is_on_the_page() -> None:
    html = page(
        made_report(),
        title="A run",
        lead="What it did.",
        pictures=[Picture(b"\x89PNG", "the caption", "the words")],
        notes=["a note"],
        command="hotloop demo --seed 3",
    )
    text = Reader(html).text
    for expected in (
        *("A run", "What it did.", "the caption", "a note", "hotloop demo --seed 3"),
        *("83.3%", "4,000", "Test CPU", "You asked for cpu.", "1,234 parameters", "fp32", "2026-01-02 03:04:05 UTC"),
        *("python 3.11.0", "torch 2.13.0", "validation accuracy", "30 updates"),
    ):
        assert expected in text
    assert 'alt="the words"' in html


def test_nothing_is_loaded_from_anywhere() -> None:
    html = page(made_report(), title="A run", pictures=[Picture(b"png", "", "")])
    read = Reader(html)
    assert read.addresses
    assert all(address.startswith("data:") for address in read.addresses)
    assert not re.search(r"https?://", html)
    assert not re.search(r"url\(|@import", html)
    assert not {"script", "link", "iframe", "object", "base"} & set(read.tags)
    assert "default-src 'none'" in html


@pytest.mark.usefixtures("no_plots")
def test_memory_that_is_unknown_prints_as_unknown() -> None:
    text = Reader(page(made_report(), title="A run")).text
    assert re.search(r"peak memory on the device\s*unknown", text)


@pytest.mark.usefixtures("no_plots")
def test_an_interrupted_run_says_so() -> None:
    assert "Stopped by Ctrl-C" in page(replace(made_report(), interrupted=True), title="A run")
    assert "Stopped by Ctrl-C" not in page(made_report(), title="A run")


def test_a_run_that_never_began_has_a_page() -> None:
    empty = replace(made_report(), epochs=(), curve=(), steps=0, seconds=0.0, reason="", device_name="", versions={})
    text = Reader(page(empty, title="A run")).text
    assert "unknown versions" in text
    assert "None" not in text
    assert "nan" not in text


HOSTILE = '<script>alert("1")</script>\'"><img src=x onerror=alert(1)>{{ 7 * 7 }}'


@pytest.mark.usefixtures("no_plots")
def test_hostile_text_is_shown_as_text() -> None:
    plain, hostile = made_report(), made_report()
    hostile = replace(
        hostile,
        device=HOSTILE,
        device_name=HOSTILE,
        reason=HOSTILE,
        precision=HOSTILE,
        started=HOSTILE,
        versions={HOSTILE: HOSTILE},
        epochs=tuple(replace(epoch, metrics={HOSTILE: 0.5}) for epoch in plain.epochs),
    )
    words = {"title": HOSTILE, "lead": HOSTILE, "command": HOSTILE}
    html = page(hostile, pictures=[Picture(b"", HOSTILE, HOSTILE)], notes=[HOSTILE], **words)
    tame = page(plain, title="t", lead="l", command="c", pictures=[Picture(b"", "c", "a")], notes=["n"])
    assert "<script" not in html
    assert "{{ 7 * 7 }}" in html
    assert HOSTILE in Reader(html).text
    extra = set(Reader(html).tags) - set(Reader(tame).tags)
    assert not extra


@pytest.mark.usefixtures("no_plots")
@settings(max_examples=30, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_leaves_the_page_whole(text: str) -> None:
    pictures = [Picture(b"png", text, text)]
    html = page(replace(made_report(), reason=text), title=text, lead=text, pictures=pictures, command=text)
    assert Reader(html).tags.count("section") == 6


def test_a_data_address_holds_the_bytes() -> None:
    assert data_uri(b"\x00\xff", "image/png") == "data:image/png;base64,AP8="


@pytest.mark.usefixtures("no_plots")
def test_several_trainings_stand_below_one_another() -> None:
    second = replace(made_report(), precision="bf16", interrupted=True)
    html = page_of([Training("sorting", made_report()), Training("drawing", second)], title="Two")
    assert html.index("How it learned: sorting") < html.index("How it learned: drawing")
    assert "Stopped by Ctrl-C" in html


def test_pixel_art_is_enlarged_without_smoothing() -> None:
    assert 'class="crisp"' in page(made_report(), title="A run", pictures=[Picture(b"png", "", "", crisp=True)])
