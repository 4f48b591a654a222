"""Lessons 3 and 6 in a real browser, from scratch: read, break, fix, be checked, see progress saved."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotloop.apps.learn.exercise import exercise
from hotloop.apps.learn.learner_progress import LearnerProgress, draft_file
from hotloop.apps.learn.lesson import lesson

from .classroom import CHROMIUM, served

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (`pip install playwright`)")
pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium (`apt install chromium`)")

SOON = 30_000  # milliseconds: how long a loaded machine may take


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=CHROMIUM)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, request: pytest.FixtureRequest, warm_checks: None) -> Iterator[Any]:
    """The list of lessons in a window like `request.param`, at whose end no error and no request to elsewhere was."""
    with served() as address:
        context = browser.new_context(**{"viewport": {"width": 980, "height": 900}, **getattr(request, "param", {})})
        opened = context.new_page()
        opened.set_default_timeout(SOON)
        errors: list[str] = []
        requests: list[str] = []
        opened.on("console", lambda said: errors.append(said.text) if said.type in {"error", "warning"} else None)
        opened.on("pageerror", lambda error: errors.append(str(error)))
        context.on("request", lambda asked: requests.append(asked.url))
        opened.goto(address)
        yield opened
        context.close()
        assert errors == []
        assert [url for url in requests if not url.startswith("http://127.0.0.1:")] == []


def has_text(found: Any, wanted: str) -> None:
    playwright.expect(found).to_have_text(re.compile(wanted), timeout=SOON)


def test_a_person_does_lesson_3_with_the_mouse(page: Any) -> None:
    page.get_by_role("link", name="The golden rule").click()
    steps = len([step for step in lesson(3).steps if step.code])
    cells = page.locator(".cell")
    assert cells.count() == steps
    cells.nth(2).get_by_role("button", name="Run").click()  # what it needs is run first
    has_text(cells.nth(2).locator(".told"), "this error is meant")
    has_text(cells.nth(0).locator(".output"), "the model: meta +the batch: cpu")
    has_text(cells.nth(2).locator(".output"), r"fix: images = images\.to\(")

    # The reader breaks a step, and restores it.
    editor = cells.nth(3).locator("textarea")
    editor.fill("images.to(devise)")
    cells.nth(3).get_by_role("button", name="Run").click()
    has_text(cells.nth(3).locator(".told"), "NameError")
    cells.nth(3).get_by_role("button", name="Restore the code").click()
    page.get_by_role("button", name="Run all steps").click()
    has_text(cells.nth(steps - 1).locator(".told"), r"^[\d.]+ m?s$")
    has_text(cells.nth(3).locator(".output"), r"after images = images\.to\(device\): meta")
    has_text(page.locator("#state"), "done")

    # The exercise: not right yet, then solved.
    page.get_by_role("button", name="Check").click()
    has_text(page.locator(".exercise .told"), "2 of 4 right, it ran on a simulated NVIDIA H200")
    assert "Hint:" in page.locator(".verdicts").inner_text()
    page.locator(".exercise textarea").fill(exercise(3).solution.read_text())
    page.get_by_role("button", name="Check").click()
    has_text(page.locator(".exercise .told"), "Solved")
    has_text(page.locator("#checked"), "passed")

    # Progress and the version are there when one comes back, as in the terminal.
    page.get_by_role("link", name="hotloop learn").click()
    has_text(page.locator('li[data-lesson="3"] .chips'), r"done\s*exercise: passed")
    kept = LearnerProgress.load()
    assert (kept.lessons, kept.exercises["3"]["passed"]) == ({"3": "done"}, True)
    page.go_back()
    assert page.locator(".exercise textarea").input_value() == exercise(3).solution.read_text()


def test_a_person_does_lesson_6_with_the_keyboard(page: Any) -> None:
    page.keyboard.press("Tab")
    page.get_by_role("link", name="The evaluation loop").focus()
    page.keyboard.press("Enter")
    cells = page.locator(".cell")
    playwright.expect(cells.first).to_be_visible()
    cells.first.locator("textarea").focus()
    for place in range(cells.count()):  # Shift+Enter runs a step and goes on to the next
        playwright.expect(cells.nth(place).locator("textarea")).to_be_focused()
        page.keyboard.press("Shift+Enter")
        has_text(cells.nth(place).locator(".told"), r"^[\d.]+ m?s$")
    has_text(cells.last.locator(".output"), "in training mode again: True")
    has_text(page.locator("#state"), "done")

    # Types in the editor: the block is indented, and what was typed can be undone.
    editor = page.locator(".exercise textarea")
    begun = editor.input_value()
    editor.focus()
    page.keyboard.press("Control+Home")
    page.keyboard.type("def twice(x):")
    page.keyboard.press("Enter")
    page.keyboard.type("return 2 * x")
    page.keyboard.press("Enter")
    assert editor.input_value() == "def twice(x):\n    return 2 * x\n    " + begun
    page.keyboard.press("Shift+Tab")
    assert editor.input_value() == "def twice(x):\n    return 2 * x\n" + begun
    for _ in range(40):
        page.keyboard.press("Control+z")
    assert editor.input_value() == begun
    page.keyboard.press("Escape")
    page.keyboard.press("Tab")
    playwright.expect(page.get_by_role("button", name="Check")).to_be_focused()

    # Breaks it, is told the line, fixes it.
    editor.focus()
    page.keyboard.press("Control+End")
    page.keyboard.type("print(acuracy)")
    page.keyboard.press("Control+Enter")
    has_text(page.locator(".verdicts li").first, "name 'acuracy' is not defined")
    editor.fill(exercise(6).solution.read_text())
    page.keyboard.press("Control+Enter")
    has_text(page.locator(".exercise .told"), "Solved")
    assert LearnerProgress.load().exercises["6"]["passed"]
    assert draft_file(exercise(6)).read_text() == exercise(6).solution.read_text()


def test_a_step_can_be_stopped_and_the_quiz_explains(page: Any) -> None:
    page.goto(page.url + "lesson/1")
    first = page.locator(".cell").first
    first.locator("textarea").fill("import time\nprint('<b>begun</b>', flush=True)\ntime.sleep(600)")
    first.get_by_role("button", name="Run").click()
    has_text(first.locator(".output"), "^<b>begun</b>")
    first.get_by_role("button", name="Stop").click()
    has_text(first.locator(".told"), "It was stopped. The next step begins with new variables.")
    page.get_by_role("link", name="Quiz").click()
    card = page.locator('[data-question="mismatch"]')
    card.get_by_text("PyTorch copies the model to the CPU").click()
    card.get_by_role("button", name="Answer").click()
    has_text(card.locator(".why"), "Not so. Right is: ?A RuntimeError")
    card = page.locator('[data-question="move-line"]')
    card.locator("input").fill("x = x.to(device)")
    card.locator("input").press("Enter")
    has_text(card.locator(".why"), "Right.")
    has_text(page.locator("#score"), "1 of 26 answered right")


def test_the_letter_that_opens_the_browser_leads_to_the_page(browser: Any, tmp_path: Path) -> None:
    from hotloop.apps.learn.web import LETTER

    with served() as address:
        letter = tmp_path / "learn.html"
        letter.write_text(LETTER.format(address=address))
        context = browser.new_context()
        opened = context.new_page()
        opened.goto(letter.as_uri())
        opened.wait_for_url(address.partition("?")[0], timeout=SOON)
        has_text(opened.locator("h1"), "GPU work in PyTorch")
        assert opened.evaluate("document.cookie") == ""
        context.close()


LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 375, "height": 700}, "device_scale_factor": 2, "has_touch": True},
}


@pytest.mark.parametrize(("name", "page"), LOOKS.items(), ids=LOOKS, indirect=["page"])
def test_it_fits_the_window_by_day_by_night_and_on_a_phone(name: str, page: Any) -> None:
    home = page.url
    for path in ("", "lesson/9", "quiz"):
        page.goto(home + path)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 128) == (name == "dark")
        assert page.evaluate(CONTRAST) >= 4.5


CONTRAST = """() => {
    const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map((part) => part / 255);
        const bent = (part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * bent(r) + 0.7152 * bent(g) + 0.0722 * bent(b);
    };
    const behind = (node) => {
        const colour = getComputedStyle(node).backgroundColor;
        return colour === "rgba(0, 0, 0, 0)" ? behind(node.parentElement) : colour;
    };
    const said = [...document.querySelectorAll("p, h1, h2, li, code, span, b, button, a, legend, summary, .paint")];
    const read = said.filter((node) => node.textContent.trim() && node.checkVisibility());
    return Math.min(...read.map((node) => {
        const [one, other] = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a);
        return (one + 0.05) / (other + 0.05);
    }));
}"""
