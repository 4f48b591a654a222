"""One process of the simulated GPU for all tests: torch is imported there once, and each script gets a fork of it."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest

from hotloop.apps.simulate.cards import card as named
from hotloop.apps.simulate.running import Simulator
from hotloop.apps.simulate.shim import library
from hotloop.apps.simulate.simulation_record import Simulation

ENGINE = Path(__file__).parent / "engine"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PREDICTIONS = BENCHMARKS / "predictions"  # whose tests have listeners of their own
CARD = replace(named("a100-80"), key="test", name="Test GPU", memory=16 << 30, sms=100)

sys.path.append(str(BENCHMARKS))  # which have what tables are made with


@dataclass(frozen=True)
class Ran:
    """A script that was simulated."""

    result: Simulation
    out: str
    err: str
    text: str

    def line(self, words: str) -> int:
        """The number of the line with these words."""
        (found,) = [number for number, line in enumerate(self.text.splitlines(), start=1) if words in line]
        return found


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, shims: Path) -> Path:
    """The shim, built once for the whole session."""
    cache = tmp_path_factory.mktemp("built")
    (cache / "simulate").symlink_to(shims)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTLOOP_CACHE", str(cache))
        return library()


_running: list[Any] = []  # the one simulator, also for the tests of the command line, which import the fixture


@pytest.fixture(scope="session")
def simulator(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if _running:
        yield _running[0]
        return
    folder = tmp_path_factory.mktemp("output")
    with (
        pytest.MonkeyPatch.context() as patch,
        (folder / "out").open("w+") as out,
        (folder / "err").open("w+") as err,
    ):
        patch.setenv("HOTLOOP_CACHE", str(built.parent.parent))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ENGINE), str(PREDICTIONS), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        with Simulator(stdout=out, stderr=err) as running:
            _running.append(SimpleNamespace(run=running.run, out=out, err=err))
            yield _running[0]
            _running.clear()


@pytest.fixture
def run(simulator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Simulate a script, given as its text or as the name of one in the folder `engine`."""

    def call(script: str, *arguments: str, card: Any = CARD, trains: bool = False, **options: Any) -> Ran:
        path = ENGINE / f"{script}.py" if "\n" not in script else tmp_path / "train.py"
        if "\n" in script:
            path.write_text(dedent(script))
        with output_of(simulator) as printed:
            result = simulator.run(path, arguments, card, **{"timed": False, **options})
        if not trains:  # nor is it meant to, in most tests
            result = replace(result, findings=tuple(each for each in result.findings if each.code != "no-steps"))
        return Ran(result, *printed, path.read_text())

    return call


@contextmanager
def output_of(simulator: Any) -> Iterator[list[str]]:
    """What scripts write to stdout and stderr from now on: there once it is left."""
    files = (simulator.out, simulator.err)
    before, printed = [file.tell() for file in files], list[str]()
    yield printed
    printed += (_since(file, place) for file, place in zip(files, before, strict=True))


def _since(file: Any, place: int) -> str:
    with Path(file.name).open() as again:
        again.seek(place)
        text = again.read()
    file.seek(0, os.SEEK_END)
    return text
