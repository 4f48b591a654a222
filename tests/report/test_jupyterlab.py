"""JupyterLab in a real browser: the bar is one output that is drawn again, and records show themselves as tables.

JupyterLab may live in another virtual environment of the same Python: HOTLOOP_JUPYTERLAB is its interpreter.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

CHROMIUM = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
LONG = 120_000  # milliseconds: how long a loaded machine may take
FIT, PLAN, CHOICE, TUNING, PROFILE = range(1, 6)  # cells
CELLS = [
    """
import time, torch, hotloop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

class Slow(TensorDataset):  # as if each item were read from a file
    def __getitem__(self, i):
        time.sleep(0.0004)
        return super().__getitem__(i)

x = torch.randn(2000, 20)
data = Slow(x, (x @ torch.randn(20, 4)).argmax(1))
loader = DataLoader(data, batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters())
loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu")
""",
    """
val = DataLoader(data, batch_size=500)
report = loop.fit(loader, epochs=6, validate=val,
                  metrics={"accuracy": hotloop.metrics.accuracy})
report
""",
    "hotloop.Plan('cuda', precision='bf16', graph=16)",
    "hotloop.pick()",
    "loop.tune(loader, steps=2000)",
    "loop.profile(loader)",
]
# What each look at the cell of `fit` finds: its outputs, how many bars there are, and the words below the bar.
WATCH = """cell => {
    window.looks = [];
    setInterval(() => {
        const outputs = [...cell.querySelectorAll('.jp-OutputArea-output')];
        const bars = [...cell.querySelectorAll('.jp-OutputArea-output div')].filter(e => e.style.height === '0.5em');
        const below = bars.map(bar => bar.nextElementSibling?.innerText ?? '');
        const look = JSON.stringify([outputs.length, bars.length, below.join('|')]);
        if (look !== window.looks.at(-1)) window.looks.push(look);
    }, 50);
}"""


@dataclass(frozen=True)
class Look:
    """The cell of `fit` at one moment."""

    outputs: int
    bars: int
    below: str


@dataclass(frozen=True)
class Shown:
    """What JupyterLab showed."""

    looks: list[Look]  # in their order, without those that are the same as the one before
    texts: list[str]  # of the outputs of each cell
    tables: list[int]  # in the outputs of each cell
    pictures: list[int]
    errors: list[str]  # of Python, and of the page


def missing() -> str | None:
    """What is not here and would be needed."""
    if shutil.which("chromium") is None:
        return "needs Chromium (`apt install chromium`)"
    if find_spec("playwright") is None:
        return "needs playwright (`pip install playwright`)"
    if "HOTLOOP_JUPYTERLAB" not in os.environ and find_spec("jupyterlab") is None:
        return "needs JupyterLab (`pip install jupyterlab`, or its Python in HOTLOOP_JUPYTERLAB)"
    return None


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """What the notebook shows once all of it has run."""
    from playwright.sync_api import sync_playwright

    with serving(tmp_path_factory.mktemp("jupyterlab")) as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=CHROMIUM)
        page = browser.new_page(viewport={"width": 860, "height": 3600})  # all cells are in sight, so all are drawn
        page.set_default_timeout(LONG)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.locator(".jp-CodeCell").nth(len(CELLS) - 1).wait_for()
        page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', state="attached")
        page.keyboard.press("Control+b")  # the files at the left
        cells = page.locator(".jp-CodeCell")
        cells.nth(FIT).evaluate(WATCH)
        page.get_by_text("Run", exact=True).first.click()
        page.get_by_text("Run All Cells", exact=True).first.click()
        page.wait_for_function("window.looks.some(look => /epoch 4.6 · batch/.test(look))")
        page.wait_for_function(
            "n => [...document.querySelectorAll('.jp-InputPrompt')].filter(e => /\\d/.test(e.innerText)).length >= n",
            arg=len(CELLS),
        )
        page.wait_for_timeout(1000)
        outputs = [cells.nth(number).locator(".jp-OutputArea-output") for number in range(len(CELLS))]
        errors += page.locator('.jp-OutputArea-output[data-mime-type*="error"]').all_inner_texts()
        shown = Shown(
            looks=[Look(*json.loads(look)) for look in page.evaluate("window.looks")],
            texts=["\n".join(each.all_inner_texts()) for each in outputs],
            tables=[each.locator("table").count() for each in outputs],
            pictures=[each.locator("svg").count() for each in outputs],
            errors=errors,
        )
        browser.close()
    return shown


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """JupyterLab with nothing but the notebook; the address of the notebook."""
    (folder / "files").mkdir()
    cells = [
        {"cell_type": "code", "id": f"cell-{n}", "metadata": {}, "source": source.strip(), "outputs": []}
        | {"execution_count": None}
        for n, source in enumerate(CELLS)
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (folder / "files" / "fit.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    folders = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    folders |= {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "IPYTHONDIR": str(folder / "ipython")}
    folders |= {"JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"), "HOTLOOP_CACHE": str(folder / "cache")}
    folders["KINETO_LOG_LEVEL"] = "99"  # else PyTorch's profiler writes on stderr that it starts and stops
    environment = {
        **os.environ,
        **folders,
        "JUPYTER_TOKEN": token,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    python = os.environ.get("HOTLOOP_JUPYTERLAB", sys.executable)
    command = [python, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder / 'files'}"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + LONG / 1000
        while not _answers(f"http://127.0.0.1:{port}/api?token={token}"):
            if server.poll() is not None or time.monotonic() > until:
                raise AssertionError((folder / "log").read_text(errors="replace"))
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/lab/tree/fit.ipynb?token={token}"
    finally:
        server.terminate()  # which ends its kernels
        server.wait(60)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):  # noqa: S310  # of this machine
            return True
    except (urllib.error.URLError, OSError):
        return False


pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


def test_the_bar_is_drawn_again_in_its_place(shown: Shown) -> None:
    assert shown.errors == []
    running = [look for look in shown.looks if look.bars]
    assert {(look.outputs, look.bars) for look in running} == {(1, 1)}, "one output with one bar, not a line for each"
    told = [look.below for look in running if "batch" in look.below]
    assert len(set(told)) >= 5, "it moves"
    assert all("items/s" in words and "elapsed" in words for words in told)


def test_when_the_run_is_over_the_bar_is_gone_and_the_epochs_stay(shown: Shown) -> None:
    assert shown.looks[-1].bars == 0
    assert shown.looks[-1].outputs == 2, "the epochs, and the report that the cell ends with"
    assert shown.texts[FIT].count("validation accuracy") >= 2
    assert "6 epochs (750 steps)" in shown.texts[FIT]
    assert shown.pictures[FIT] == 2


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (FIT, "items/s"),
        (PLAN, "precision"),
        (CHOICE, "cpu"),
        (TUNING, "A plan for Sequential"),
        (PROFILE, "a step takes"),
    ],
)
def test_a_record_shows_its_table(shown: Shown, cell: int, words: str) -> None:
    assert words in shown.texts[cell]
    assert shown.tables[cell] >= 1
    assert "<div" not in shown.texts[cell], "markup, not text"
