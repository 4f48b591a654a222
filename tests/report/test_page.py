"""The page: complete, self-contained, and never fooled by what it is given."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hotloop.records import Report
from hotloop.report.document import Gallery, Picture, data_uri
from hotloop.report.training_page import page as page_of

from ..thorough import tries
from .reading import Reader
from .reports import made_report


def page(report: Report, pictures: Sequence[Picture] = (), **words: Any) -> str:
    """A page of one training with one gallery."""
    return page_of({"": report}, galleries=[Gallery("Pictures", pictures)] if pictures else [], **words)


def test_everything_that_was_measured_is_on_the_page() -> None:
    html = page(
        made_report(),
        title="A run",
        lead="What it did.",
        pictures=[Picture(b"\x89PNG", "the caption", "the words")],
        command="hotloop demo --seed 3",
    )
    text = Reader(html).text
    for expected in (
        *("A run", "What it did.", "the caption", "hotloop demo --seed 3"),
        *("83.3%", "4,000", "Test CPU", "You asked for cpu.", "1,234 parameters", "fp32", "2026-01-02 03:04:05 UTC"),
        *("python 3.11.0", "torch 2.13.0", "validation accuracy", "30 updates"),
    ):
        assert expected in text
    assert 'alt="the words"' in html
    assert re.search(r"peak memory on the device\s*unknown", text)
    assert "Stopped by Ctrl-C" not in text


def test_nothing_is_loaded_from_anywhere() -> None:
    html = page(made_report(), title="A run", pictures=[Picture(b"png", "", "", crisp=True)])
    assert 'class="crisp"' in html, "pixel art is enlarged without smoothing"
    read = Reader(html)
    assert read.addresses
    assert all(address.startswith("data:") for address in read.addresses)
    assert not re.search(r"https?://", html)
    assert not re.search(r"url\(|@import", html)
    assert not {"script", "link", "iframe", "object", "base"} & set(read.tags)
    assert "default-src 'none'" in html


def test_a_run_that_never_began_has_a_page() -> None:
    empty = replace(made_report(), epochs=(), curve=(), steps=0, seconds=0.0, reason="", device_name="", versions={})
    text = Reader(page(empty, title="A run")).text
    assert "unknown versions" in text
    assert "None" not in text
    assert "nan" not in text


HOSTILE = '<script>alert("1")</script>\'"><img src=x onerror=alert(1)>{{ 7 * 7 }}'


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
    html = page(hostile, pictures=[Picture(b"", HOSTILE, HOSTILE)], **words)
    tame = page(plain, title="t", lead="l", command="c", pictures=[Picture(b"", "c", "a")])
    assert "<script" not in html
    assert "{{ 7 * 7 }}" in html
    assert HOSTILE in Reader(html).text
    extra = set(Reader(html).tags) - set(Reader(tame).tags)
    assert not extra


@settings(max_examples=tries(10, 30), deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_leaves_the_page_whole(text: str) -> None:
    pictures = [Picture(b"png", text, text)]
    html = page(replace(made_report(), reason=text), title=text, lead=text, pictures=pictures, command=text)
    assert Reader(html).tags.count("section") == 7


def test_several_trainings_stand_below_one_another() -> None:
    second = replace(made_report(), precision="bf16", interrupted=True)
    html = page_of({"sorting": made_report(), "drawing": second}, title="Two")
    assert html.index("How it learned: sorting") < html.index("How it learned: drawing")
    assert "Stopped by Ctrl-C" in html


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium (`apt install chromium`)")
def test_in_a_browser_pictures_fill_their_section_and_are_dark_on_a_dark_page(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (`pip install playwright`)")
    day, night = (_square(colour) for colour in ("white", "black"))
    file = tmp_path / "page.html"
    file.write_text(page(made_report(), title="A run", pictures=2 * [Picture(day, "caption", "alt", dark=night)]))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        for scheme, picture in (("light", day), ("dark", night)):
            shown = browser.new_page(color_scheme=scheme, viewport={"width": 1100, "height": 900})
            shown.goto(file.as_uri())
            section, gallery = (shown.locator(f"{tag}.gallery").bounding_box() for tag in ("section", "div"))
            assert gallery["width"] > 0.9 * section["width"]
            wraps = shown.evaluate("getComputedStyle(document.querySelector('th')).overflowWrap")
            assert wraps == "normal", "a label is not broken inside a word"
            current = shown.locator("div.gallery img").first.evaluate("image => image.currentSrc")
            assert current == data_uri(picture, "image/png")
            assert shown.locator("section.drawing svg path").count() > 5
            lines = shown.evaluate("getComputedStyle(document.querySelector('section.drawing path:last-child')).stroke")
            assert lines == {"light": "rgb(11, 114, 133)", "dark": "rgb(76, 201, 216)"}[scheme]
            shown.emulate_media(media="print")
            assert shown.evaluate("getComputedStyle(document.body).color") == "rgb(31, 36, 48)", "dark on white paper"
        browser.close()


def _square(colour: str) -> bytes:
    file = BytesIO()
    Image.new("RGB", (8, 8), colour).save(file, "PNG")
    return file.getvalue()
