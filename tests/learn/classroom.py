"""A server of the lessons for tests, and what a browser or a stranger would send to it; also the pictures of the docs.

`python -m tests.learn.classroom docs/pictures` takes the pictures again.
"""

import asyncio
import http.client
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hotloop.apps.learn.web import serving

CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@contextmanager
def served() -> Iterator[str]:
    """The address of a server that ends with the block."""
    found: list[str] = []
    ends: list[Callable[[], object]] = []
    ready = threading.Event()

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        try:
            async with serving(port=0) as address:
                ends.append(lambda: loop.call_soon_threadsafe(stop.set))
                found.append(address)
                ready.set()
                await stop.wait()
        finally:
            ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    ready.wait()
    try:
        yield found[0]
    finally:
        for end in ends:
            end()
        thread.join()


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: http.client.HTTPMessage
    text: str

    @property
    def data(self) -> Any:
        return json.loads(self.text)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.text.splitlines()]


class Visitor:
    """Sends requests; with the cookie that the token is changed for, those of the page."""

    def __init__(self, address: str) -> None:
        self.address = address
        parts = urlsplit(address)
        self.netloc, self.origin = parts.netloc, f"http://{parts.netloc}"
        self.cookie = ""

    def enter(self) -> "Visitor":
        """Open the address that was printed."""
        came = self.send("GET", self.address.removeprefix(self.origin))
        self.cookie = came.headers["Set-Cookie"].partition(";")[0]
        return self

    def send(self, method: str, path: str, body: str | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection(self.netloc, timeout=60)
        sent = {"Cookie": self.cookie, **{name.replace("_", "-"): value for name, value in headers.items()}}
        try:
            connection.request(method, path, body, {name: value for name, value in sent.items() if value})
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read().decode())
        finally:
            connection.close()

    def post(self, path: str, data: Any, **headers: str) -> Answer:
        """As the page's own script does."""
        sent = {"Origin": self.origin, "Content_Type": "application/json", **headers}
        return self.send("POST", f"/api/{path}", json.dumps(data), **sent)


def take_pictures(folder: Path) -> None:
    """Lesson 3 with steps that were run, by day; its exercise with one mistake repaired, by night."""
    from playwright.sync_api import expect, sync_playwright

    with served() as address, sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=CHROMIUM)
        for name, scheme in (("learn-web", "light"), ("learn-check", "dark")):
            context = chromium.new_context(viewport={"width": 940, "height": 1040}, color_scheme=scheme)
            page = context.new_page()
            page.goto(address)
            page.goto(f"{page.url}lesson/3")
            if name == "learn-web":
                third = page.locator(".cell").nth(2)
                third.get_by_role("button", name="Run").click()
                expect(third.locator(".told")).to_contain_text("meant", timeout=60_000)
                page.locator(".cell").nth(1).get_by_role("button", name="Run").click()  # torch is there by now
                expect(page.locator(".cell").nth(1).locator(".told")).to_contain_text("ms", timeout=60_000)
                page.evaluate("scrollTo(0, 0)")
            else:
                editor = page.locator(".exercise textarea")
                editor.fill(editor.input_value().replace("text.shape[1])", "text.shape[1], device=text.device)"))
                page.get_by_role("button", name="Check").click()
                expect(page.locator(".exercise .told")).to_contain_text("right", timeout=60_000)
                page.evaluate("document.querySelector('.verdicts').scrollIntoView({ block: 'end' })")
            page.screenshot(path=folder / f"{name}.png")
            context.close()
        chromium.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home  # the pictures are of nobody's own folders
        take_pictures(Path(sys.argv[1]))
