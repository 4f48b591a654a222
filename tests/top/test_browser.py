"""The page in a real browser: it lives, it asks no other machine, and what comes from outside stays text."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from hotloop.apps.top.advice import Advice
from hotloop.apps.top.feed import Feed
from hotloop.monitor.reading import Host, Reading

from .pretend import CHROMIUM, Machine, after_an_hour, served, workstation
from .test_ranks import reading, run_of

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (`pip install playwright`)")
pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium (`apt install chromium`)")

NAUGHTY = "<img src=x onerror=\"document.title='caught'\">\x1b[31m\u202e"
SOON = 60_000  # milliseconds: how long a loaded machine may take


@dataclass
class Watched:
    """A page, and everything that should not happen to it."""

    page: Any
    errors: list[str]
    requests: list[str]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=CHROMIUM)
        yield chromium
        chromium.close()


@pytest.fixture
def watched(browser: Any, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """A page of a window like `request.param`, at whose end no error and no request to elsewhere was seen."""
    context = browser.new_context(**{"viewport": {"width": 1240, "height": 900}, **getattr(request, "param", {})})
    page = context.new_page()
    page.set_default_timeout(SOON)
    found = Watched(page, [], [])
    page.on("console", lambda said: found.errors.append(said.text) if said.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    context.on("request", lambda asked: found.requests.append(asked.url))
    yield found
    context.close()
    assert found.errors == []
    assert found.requests
    assert [url for url in found.requests if not url.startswith("http://127.0.0.1:")] == []


def text(page: Any, selector: str) -> str:
    return str(page.locator(selector).first.inner_text())


def wait_for_text(page: Any, selector: str, wanted: str) -> None:
    playwright.expect(page.locator(selector).first).to_have_text(re.compile(wanted), timeout=SOON)


def test_values_live_processes_and_ranks_come_and_go_and_a_pause_holds_them(watched: Watched) -> None:
    base = workstation(3600)
    machine, page = Machine(base), watched.page
    feed = Feed(machine, every=0.1)
    with served(feed) as address:
        page.goto(address)
        wait_for_text(page, "#state-words", "Live")
        value = ".gpu .plot .value"
        wait_for_text(page, value, f"{base.gpus[0].utilisation}%")
        machine.reading = replace(base, gpus=(replace(base.gpus[0], utilisation=17.0, power=None), base.gpus[1]))
        wait_for_text(page, value, "17%")
        assert text(page, ".gpu .plot:nth-child(3) .value") == "–"

        rows = page.locator("#rows tr")
        playwright.expect(rows).to_have_count(6, timeout=SOON)
        newcomer = replace(base.gpus[1].processes[0], pid=31337, name="newcomer", memory=5 * 2**30)
        more = replace(base.gpus[1], processes=(newcomer, *(base.gpus[1].processes or ())))
        machine.reading = replace(base, gpus=(base.gpus[0], more))
        playwright.expect(rows).to_have_count(7, timeout=SOON)
        assert "newcomer" in rows.nth(1).inner_text()  # by memory
        machine.reading = replace(base, gpus=base.gpus[:1])
        playwright.expect(page.locator(".gpu")).to_have_count(1, timeout=SOON)
        assert "newcomer" not in page.inner_text("body")

        machine.reading = reading(run_of(2, program=NAUGHTY))
        playwright.expect(page.locator(".gpu")).to_have_count(2, timeout=SOON)
        assert [text(page, f".gpu:nth-child({i}) .index") for i in (1, 2)] == ["GPU 0", "GPU 1"]
        wait_for_text(page, ".run h2", "2 ranks of <img")
        wait_for_text(page, ".straggler", "^The others wait for rank 1 on node-a: its part of an update takes 60.0 ms")
        assert page.locator(".run tbody tr").count() == 2
        assert text(page, ".run tbody tr").split()[:3] == ["0", "cuda:0", "train.py:57"]
        assert text(page, ".run .slow td") == "1"
        assert page.title() != "caught"

        machine.reading = base
        playwright.expect(page.locator(".run")).to_have_count(0, timeout=SOON)
        page.get_by_role("button", name="Pause").click()
        wait_for_text(page, "#state-words", "Paused")
        machine.reading = replace(base, host=replace(base.host, name="osprey"))
        before = feed.latest.number if feed.latest else 0
        while feed.latest is None or feed.latest.number < before + 5:
            page.wait_for_timeout(50)
        assert text(page, "h1") == "kestrel"
        page.get_by_role("button", name="Go on").click()
        wait_for_text(page, "h1", "osprey")
        wait_for_text(page, "#state-words", "Live")


def test_names_stay_text(watched: Watched) -> None:
    process = replace(workstation(0).gpus[1].processes[0], name=NAUGHTY, command=NAUGHTY, user=NAUGHTY)
    gpu = replace(workstation(0).gpus[0], name=NAUGHTY, processes=(process,), throttled=(NAUGHTY,), error=NAUGHTY)
    reading = Reading(1e9, Host(name=NAUGHTY), (gpu,), driver=NAUGHTY, notes=(NAUGHTY,))
    feed = Feed(Machine(reading), every=3600)
    feed.take(reading, (Advice(NAUGHTY, 0, NAUGHTY, fix=f"`{NAUGHTY}`"),), trouble=NAUGHTY)
    feed.start = lambda: None  # type: ignore[method-assign]  # this one sample is all
    with served(feed) as address:
        page = watched.page
        page.goto(address)
        wait_for_text(page, ".program", re.escape("<img src=x"))
        outer = ("h1", "#lead", "#trouble", "#note-list", ".fix code")
        for selector in (".program", "td small", ".name", ".chips", ".gpu .trouble", *outer):
            shown = text(page, selector)
            assert "onerror=" in shown, selector
            assert "\\x1b[31m\\u202e" in shown, selector
        assert page.locator("img").count() == 0
        assert "caught" not in page.title().replace(NAUGHTY[: NAUGHTY.index("\x1b")], "")


def test_the_token_leaves_the_address_bar_and_a_lost_connection_is_shown_and_comes_back(watched: Watched) -> None:
    feed, token = Feed(Machine(workstation(0)), every=0.1), "a-token-of-this-test"
    with served(feed, token=token) as address:
        port = int(address.partition("/?")[0].rsplit(":", 1)[1])
        watched.page.goto(address)
        wait_for_text(watched.page, "#state-words", "Live")
        assert token in address
        assert token not in watched.page.url
        assert watched.page.evaluate("document.cookie") == ""
        refused = watched.page.evaluate(
            """() => {
                try { document.body.innerHTML = "<b>hello</b>"; return "allowed"; }
                catch (error) { return error.name; }
            }"""
        )
        assert refused == "TypeError", "the browser itself refuses markup from text"
        assert all("TrustedHTML" in said or "Trusted Type" in said for said in watched.errors)
        watched.errors.clear()
    wait_for_text(watched.page, "#state-words", "Connection lost")
    assert watched.page.get_attribute("#state", "data-state") == "lost"
    with served(Feed(Machine(workstation(9)), every=0.1), port=port):
        wait_for_text(watched.page, "#state-words", "Live")
    watched.errors[:] = [said for said in watched.errors if "ERR_" not in said]  # the browser's own word on the loss


def test_without_a_gpu_it_shows_the_host_and_the_reason(watched: Watched) -> None:
    reason = "NVML is not there: install NVIDIA's driver, then `nvidia-smi` works."
    with served(Feed(Machine(Reading(1e9, Host(name="laptop", cores=4), notes=(reason,))), every=0.1)) as address:
        page = watched.page
        page.goto(address)
        wait_for_text(page, "#reasons", "NVML is not there")
        assert text(page, "#lead") == "no GPU · 4 cores"
        assert text(page, "#reasons code") == "nvidia-smi"
        assert [text(page, f"#computer .plot:nth-child({i}) .value") for i in (1, 2)] == ["–", "–"]
        assert page.locator("#processes").is_hidden()


COLOURED = """() => {
    const canvas = document.querySelector("canvas");
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const columns = new Set();
    for (let i = 0; i < pixels.length; i += 4) {
        if (pixels[i] > pixels[i + 2] + 100 && pixels[i + 3] > 200) columns.add((i / 4) % canvas.width);
    }
    return columns.size > canvas.width * 0.9;
}"""


def test_after_24_hours_at_2_hz_the_page_holds_an_hour_and_answers(watched: Watched) -> None:
    with served(Feed(Machine(workstation(0)), every=0.1)) as address:
        page = watched.page
        page.goto(address)
        wait_for_text(page, "#state-words", "Live")
        told = page.evaluate(
            """async () => {
                const { Series } = await import("/series.js");
                const { Plot } = await import("/plot.js");
                const series = new Series();
                const names = Array.from({ length: 6 }, (_, i) => `n${i}`); // one GPU and its host
                for (let half = 0; half < 172800; half += 1) {
                    series.add(1e9 + half / 2, new Map(names.map((name) => [name, half % 100])));
                }
                const canvas = document.querySelector("canvas");
                const plot = new Plot(canvas, series, { name: "n0", colour: "power", most: () => 100, words: String });
                const begun = performance.now();
                for (let i = 0; i < 34; i += 1) {
                    plot.draw({ from: 1e9 + 82800, to: 1e9 + 86400, mark: null, style: {} });
                }
                const lengths = [series.times, ...series.values.values()].map((list) => list.length);
                return { lengths: [...new Set(lengths)], drawn: performance.now() - begun, first: series.times[0] };
            }"""
        )
        [length] = told["lengths"]
        assert 1800 <= length <= 2001
        assert told["first"] >= 1e9 + 86400 - 4100
        assert told["drawn"] < 1000  # all plots of eight GPUs; some ten milliseconds on an idle machine
        page.get_by_role("button", name="Pause").click()
        wait_for_text(page, "#state-words", "Paused")


@pytest.mark.parametrize(
    ("name", "watched"),
    [
        ("light", {"color_scheme": "light"}),
        ("dark", {"color_scheme": "dark"}),
        ("phone", {"viewport": {"width": 375, "height": 700}, "device_scale_factor": 2, "has_touch": True}),
    ],
    indirect=["watched"],
)
def test_it_fits_the_window_by_day_by_night_and_on_a_phone(name: str, watched: Watched) -> None:
    feed = after_an_hour()
    feed.start = lambda: None  # type: ignore[method-assign]
    with served(feed) as address:
        page = watched.page
        page.goto(address)
        wait_for_text(page, "#state-words", "Live")
        page.wait_for_selector(".gpu canvas")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(json.loads(ground.replace("rgb(", "[").replace(")", "]"))) < 128) == (name == "dark")
        assert page.evaluate(CONTRAST) >= 4.5
        page.wait_for_function(COLOURED)
        sizes = page.evaluate("[...document.querySelectorAll('.gpu canvas')].map((c) => c.width / c.clientWidth)")
        assert sizes == pytest.approx([2.0 if name == "phone" else 1.0] * 8, abs=0.02), "a pixel for each of the screen"
        label = page.locator("canvas").first.get_attribute("aria-label")
        assert re.fullmatch(r"GPU 0: Utilisation \d+% now, from \d+% to \d+% in the last hour", label)
        assert text(page, "#pieces .words").startswith("4.1 GiB of GPU 0 is held by python3")
        assert text(page, "#pieces code") == "kill 20417"
        assert page.locator("#advice").bounding_box()["y"] < page.locator(".gpu").first.bounding_box()["y"]
        if name == "light":
            pointing_at_a_plot_shows_that_time_in_all_of_them(page)


def pointing_at_a_plot_shows_that_time_in_all_of_them(page: Any) -> None:
    wait_for_text(page, ".gpu:nth-child(2) .value", "^0%")
    page.locator("canvas").first.hover(position={"x": 20, "y": 40})
    wait_for_text(page, ".gpu:nth-child(2) .value", r"^\d\d%")
    assert re.fullmatch(r"\d\d:\d\d:\d\d", text(page, ".gpu:nth-child(2) .detail"))
    page.mouse.move(1, 1)
    wait_for_text(page, ".gpu:nth-child(2) .value", "^0%")


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
    const said = [...document.querySelectorAll("p, h1, h2, td, th, small, code, span, button, a, footer")];
    return Math.min(...said.filter((node) => node.textContent.trim()).map((node) => {
        const [one, other] = [light(getComputedStyle(node).color), light(behind(node))].sort((a, b) => b - a);
        return (one + 0.05) / (other + 0.05);
    }));
}"""
