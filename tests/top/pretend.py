"""A workstation that does not exist, its last hour, and a server for it; also what makes the pictures of the docs.

`python -m tests.top.pretend docs/pictures/top-web.png docs/pictures/top.svg` makes them again.
"""

import asyncio
import copy
import http.client
import io
import math
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp.test_utils import TestServer
from hypothesis import strategies as st
from rich.console import Console

from hotloop.apps.top.access import Gate
from hotloop.apps.top.advice import Advice, Advisor
from hotloop.apps.top.example import machine, reading_at
from hotloop.apps.top.feed import Feed
from hotloop.apps.top.server import application, quiet_log
from hotloop.apps.top.view import screen
from hotloop.apps.top.web import address_of
from hotloop.monitor.reading import Gpu, Host, Process, Reading

BEGUN = 1_773_496_800.0  # 14 March 2026
ENDED = 2300  # the second in which the run on GPU 1 is over
HELD = Advice(
    rule="idle-memory",
    gpu=0,
    words="4.1 GiB of GPU 0 is held by python3 (PID 20417 of guest, idle for 12 min)",
    fix="if nobody needs it, end it (`kill 20417`); of a notebook, shut the kernel down",
)
NASTY = "\x1b[2J\x1b]0;owned\x07\r\n[red]not red[/red] [/] \u202eevil\u2066 \u2028 \x9b31m 漢字 e\u0301\u200d\ud800"
ODD = st.one_of(st.none(), st.text(), st.sampled_from([NASTY, "", " ", "x" * 5000, "漢" * 400, "[bold", "\\", "👩‍🚀"]))
NAME = ODD.map(lambda text: text or "")
REAL, WHOLE = st.none() | st.floats(-1e12, 1e12), st.none() | st.integers(-5, 2**64)
REASONS = st.sampled_from(["heat", "power cap", "power brake"]) | NAME
KINDS = st.sampled_from(["compute", "graphics", "both"]) | NAME
PROCESSES = st.builds(Process, st.integers(-1, 2**31), WHOLE, KINDS, ODD, ODD, ODD, st.booleans(), REAL, REAL)
PERCENT = REAL | st.floats(0, 100)
GPUS = st.builds(
    Gpu,
    index=st.integers(0, 99),
    name=NAME,
    utilisation=PERCENT,
    memory_used=WHOLE,
    memory_total=WHOLE,
    temperature=REAL,
    power=REAL,
    power_limit=REAL,
    clock=REAL,
    clock_most=REAL,
    throttled=st.none() | st.lists(REASONS, max_size=3).map(tuple),
    ecc_uncorrected=st.none() | st.integers(0, 3),
    processes=st.none() | st.lists(PROCESSES, max_size=5).map(tuple),
    error=st.none() | st.none() | ODD,
)
HOSTS = st.builds(Host, ODD, PERCENT, st.none() | st.integers(0, 512), WHOLE, WHOLE, WHOLE, REAL, REAL, REAL, REAL)
READINGS = st.builds(
    Reading, st.floats(-1e9, 1e10), HOSTS, st.lists(GPUS, max_size=4).map(tuple), ODD, st.lists(NAME, max_size=3)
)
CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@cache
def workstation(second: int) -> Reading:
    """The machine of the demo, on whose second GPU a run ends; memory stays."""
    reading = reading_at(second, BEGUN, 2, "kestrel")
    first, other = (replace(gpu, uuid=f"GPU-5d5a3c1e-000{gpu.index}") for gpu in reading.gpus)
    busy = 0.0 if second >= ENDED else 72 + 7 * math.sin(second / 150)
    return replace(reading, notes=(), gpus=(first, replace(other, utilisation=busy, power=70 + 4.2 * busy)))


class Machine:
    """Readings that a test can change while a page shows them."""

    def __init__(self, reading: Reading | None = None) -> None:
        self.reading = reading
        self.second = 3600

    def __call__(self) -> Reading:
        self.second += 1
        return workstation(self.second) if self.reading is None else self.reading


@contextmanager
def served(feed: Feed, *, token: str | None = None, port: int = 0) -> Iterator[str]:
    """The address of a real server in a thread."""
    known: list[str] = []
    begun, ended = threading.Event(), threading.Event()

    async def run() -> None:
        server = TestServer(application(feed, Gate(token, loopback=True)), port=port)
        await server.start_server(logger=quiet_log(), shutdown_timeout=1)
        known.append(address_of("127.0.0.1", server.port or 0, token))
        begun.set()
        await asyncio.to_thread(ended.wait)
        await server.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert begun.wait(60)
        yield known[0]
    finally:
        ended.set()
        thread.join(60)


def ask(address: str, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, Any, str]:
    """Status, headers and body of an answer; `Sec_Fetch_Site` is the header Sec-Fetch-Site."""
    where = urlsplit(address)
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()
    finally:
        connection.close()


def after_an_hour(every: float = 1.0) -> Feed:
    """A feed that has seen an hour of the workstation."""
    seen, advisor = _hour()
    feed = Feed(Machine(), every=every, advisor=copy.deepcopy(advisor))
    for reading, advice in seen:
        feed.take(reading, advice)
    return feed


@cache
def _hour() -> tuple[list[tuple[Reading, tuple[Advice, ...]]], Advisor]:
    advisor = Advisor()
    readings = [workstation(second) for second in range(0, 3601, 2)]
    return [(reading, advisor.see(reading)) for reading in readings], advisor


def terminal(width: int = 100) -> str:
    """The screen after a minute of training, as SVG."""
    read = machine(start=time.mktime((2026, 3, 14, 15, 9, 0, 0, 0, -1)))
    *_, reading = (read() for _ in range(61))
    console = Console(record=True, width=width, file=io.StringIO(), color_system="truecolor", highlight=False)
    console.print(screen(reading, (HELD,), me="user"))
    drawn = console.export_svg(title="hotloop top", unique_id="top")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # whoever looks at it asks no server for a font


def picture(path: Path) -> None:
    """The page in Chromium, as PNG."""
    from playwright.sync_api import sync_playwright

    with served(after_an_hour()) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=CHROMIUM)
        page = browser.new_page(viewport={"width": 1240, "height": 1000})
        page.goto(address)
        page.wait_for_selector('[data-state="live"]')
        page.wait_for_timeout(1500)
        page.screenshot(path=path, full_page=True)
        browser.close()


if __name__ == "__main__":
    picture(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(terminal(), encoding="utf-8")
