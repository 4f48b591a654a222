"""A workstation that does not exist, its last hour, and a server for it; also what makes the picture of the docs.

`python -m tests.top.pretend docs/pictures/top-web.png` takes the picture again.
"""

import asyncio
import copy
import http.client
import math
import random
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hotloop.apps.top.advice import Advice, Advisor
from hotloop.apps.top.feed import Feed
from hotloop.apps.top.web import serving
from hotloop.monitor.reading import Gpu, Host, Process, Reading

GIB = 2**30
BEGUN = 1_773_496_800.0  # 14 March 2026
ENDED = 2300  # the second in which the run on GPU 1 is over
CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]

TRAIN = Process(
    pid=20416,
    memory=int(19.1 * GIB),
    kind="compute",
    name="python",
    command="python train.py --data /data/sprites --epochs 90 --batch-size 512",
    user="user",
    ours=True,
    cpu=118.0,
    started=BEGUN - 8_040,
)
FINETUNE = replace(TRAIN, pid=20977, memory=int(10.9 * GIB), command="python finetune.py", user="guest", ours=False)
NOTEBOOK = Process(
    pid=18790,
    memory=int(4.1 * GIB),
    kind="compute",
    name="python3",
    command="python3 -m ipykernel_launcher -f /run/user/1001/jupyter/kernel-4b1c.json",
    user="guest",
    cpu=0.0,
    started=BEGUN - 92_700,
)
DESKTOP = Process(
    pid=1204,
    memory=210 * 2**20,
    kind="graphics",
    name="Xorg",
    command="/usr/lib/xorg/Xorg :0",
    user="root",
    cpu=1.2,
    started=BEGUN - 1_040_000,
)


def workstation(second: int) -> Reading:
    """Each second is the same whenever asked for: GPU 0 trains and validates; on GPU 1 a run ends, memory stays."""
    noise = random.Random(second)  # noqa: S311  # of a picture
    epoch = (second + 40) % 430
    training = 94 + noise.gauss(0, 1.6) if epoch > 32 else 30 + noise.gauss(0, 7)
    other = 72 + 7 * math.sin(second / 150) + noise.gauss(0, 2) if second < ENDED else 0.0
    now = BEGUN + second
    return Reading(
        time=now,
        host=Host(
            name="kestrel",
            cpu=22 + 30 * (epoch <= 32) + 8 * (second < ENDED) + noise.gauss(0, 1.8),
            cores=24,
            memory_used=int((46.5 + epoch / 210 + 5.5 * (second < ENDED)) * GIB),
            memory_total=int(125.6 * GIB),
            swap_used=0,
            disk_read=max(0.0, 180e6 + noise.gauss(0, 30e6)),
            disk_written=2.6e6,
            net_received=410e3,
            net_sent=96e3,
        ),
        gpus=(
            _gpu(0, training, 19.6 if epoch > 32 else 17.1, _warm(second, 0), (TRAIN, DESKTOP)),
            _gpu(
                1,
                other,
                15.2 if second < ENDED else 4.3,
                _warm(second, ENDED),
                (FINETUNE, NOTEBOOK) if second < ENDED else (NOTEBOOK,),
            ),
        ),
        driver="580.95.05",
    )


def _warm(second: int, until: int) -> float:
    """Degrees over those of an idle GPU: they come and go slowly."""
    return 30.0 if not until or second < until else 30.0 * math.exp(-(second - until) / 180)


def _gpu(index: int, busy: float, held: float, warmth: float, processes: tuple[Process, ...]) -> Gpu:
    busy = max(0.0, min(100.0, busy))
    return Gpu(
        index=index,
        name="NVIDIA GeForce RTX 4090",
        uuid=f"GPU-5d5a3c1e-0000-0000-0000-00000000000{index}",
        utilisation=round(busy),
        memory_used=int(held * GIB),
        memory_free=int((23.99 - held) * GIB),
        memory_total=int(23.99 * GIB),
        temperature=round(36 + warmth * (0.75 + busy / 400)),
        fan=round(30 + warmth * 1.1),
        power=round(22 + 3.7 * busy, 1),
        power_limit=450.0,
        energy=8.1e6,
        clock=2_595.0 if busy > 5 else 210.0,
        clock_most=3_105.0,
        memory_clock=10_501.0,
        memory_clock_most=10_501.0,
        throttled=(),
        sent=21e6 * (busy > 5),
        received=640e6 * (busy > 5),
        processes=processes,
    )


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
        async with serving(feed, port=port, token=token) as address:
            known.append(address)
            begun.set()
            await asyncio.to_thread(ended.wait)

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


def picture(path: Path, *, width: int = 1240, height: int = 1000, dark: bool = False, scale: float = 1.0) -> None:
    """The page in Chromium, as PNG."""
    from playwright.sync_api import sync_playwright

    with served(after_an_hour()) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=CHROMIUM)
        page = browser.new_page(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            device_scale_factor=scale,
        )
        page.goto(address)
        page.wait_for_selector('[data-state="live"]')
        page.wait_for_timeout(1500)
        page.screenshot(path=path, full_page=True)
        browser.close()


if __name__ == "__main__":
    picture(Path(sys.argv[1]))
