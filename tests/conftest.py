"""What all tests share: the `gpu` marker, a torch that does not fight over the cores, and small things to train."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .thorough import THOROUGH
from .warm import SERVER, WITH_CHILDREN, ForkedChild, Warm

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # the same for every process that a test starts
# Kernels without vector instructions: the C++ compiler is quicker with them, and is not tried out for them before.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
NUMBERS = count()
FROZEN = [0]  # modules whose objects no garbage collection looks at
# A machine may be slow or busy, so nothing has a deadline. The same examples each time, so that a test fails for what
# was changed; HOTLOOP_TEST_RANDOM=1 looks for new ones, and for more of them.
settings.register_profile("any machine", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("new examples", deadline=None, max_examples=200)
settings.load_profile("new examples" if THOROUGH else "any machine")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background by a shell; tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup; tests send it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def install_verbs() -> None:
    """Where the package is found by PYTHONPATH alone, nothing tells of its verbs: give it what an installation has."""
    if entry_points(group="hotloop.verbs"):
        return
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = tempfile.mkdtemp(prefix="hotloop-verbs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    about = Path(folder, "hotloop-0.dist-info")
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hotloop\nVersion: 0\n")
    verbs = project["entry-points"]["hotloop.verbs"]
    (about / "entry_points.txt").write_text("\n".join(["[hotloop.verbs]", *map(" = ".join, verbs.items())]))
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), folder])


install_verbs()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Examples in docstrings are those of the package; to look for them here would import all that tests start."""
    return [each for each in (yield) if type(each).__name__ != "DoctestModule"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none (`hotloop device` says why)")
    for item in items:
        if "gpu" in item.keywords and not is_simulated(item):
            item.add_marker(skip)


def is_simulated(item: pytest.Item) -> bool:
    """Whether a test for a GPU runs on a simulated one where there is no other; HOTLOOP_TEST_SIMULATED=1: all try."""
    marker = item.get_closest_marker("simulated")
    return "HOTLOOP_TEST_SIMULATED" in os.environ if marker is None else marker.args != (False,)


@pytest.fixture(scope="session")
def shims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the library of the simulated GPU lies: compiled once, for the tests of all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shims"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def _nothing_from_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, shims: Path
) -> None:
    monkeypatch.delenv("HOTLOOP_DEVICE", raising=False)
    cache = tmp_path_factory.getbasetemp() / "caches" / str(next(NUMBERS))  # `mktemp` looks at all that are there
    cache.mkdir(mode=0o700, parents=True)
    (cache / "simulate").symlink_to(shims)
    monkeypatch.setenv("HOTLOOP_CACHE", str(cache))


@pytest.fixture(autouse=True)
def _on_a_simulated_gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _nothing_from_outside: None
) -> Iterator[None]:
    if "gpu" not in request.node.keywords or torch.cuda.is_available():
        yield
        return
    from .simulated_gpu import simulated_gpu

    with simulated_gpu(monkeypatch):
        yield


@pytest.fixture(autouse=True)
def _nothing_is_compiled_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are expected to be long wait for a compilation; a test that wants one says so."""
    monkeypatch.setattr("hotloop.tune.course.HELD_UP", 0.0)


@pytest.fixture(autouse=True)
def _nothing_was_compiled() -> Iterator[None]:
    """A profile asks whether anything was compiled in its process; what another test compiled is not meant."""
    yield
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        dynamo.counters.clear()


@pytest.fixture
def no_kernels() -> Iterator[None]:
    """What is compiled calls PyTorch's kernels: a C++ compiler takes seconds for each new one.

    `test_a_compiled_step_is_nearly_the_same_training` has such.
    """
    from torch._inductor import config

    with config.patch({"fallback_by_default": True} if hasattr(config, "fallback_by_default") else {}):
        yield


@pytest.fixture
def nothing_rounds() -> Iterator[None]:
    """Levers that change the rounding are left alone."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist have one process that forks in common; it imports torch while they collect the tests."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        return
    running = Warm().__enter__()
    config.add_cleanup(running.close)
    os.environ[SERVER] = running.server


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Runs scripts in processes that have torch already."""
    with Warm(os.environ.get(SERVER)) as running:
        yield running


@pytest.fixture
def forked_children(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that hotloop starts from this one are forks of one that has torch."""
    monkeypatch.setattr(ForkedChild, "server", warm.server, raising=False)
    for name in WITH_CHILDREN:
        monkeypatch.setattr(f"{name}.Child", ForkedChild)


@pytest.fixture(scope="session", autouse=True)
def _heap() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap(_heap: None) -> None:
    """Modules and collected tests are not looked through for garbage and for tensors again and again."""
    if len(sys.modules) > FROZEN[0] + 100:  # many are imported by the first test that needs them
        gc.collect()
        gc.freeze()
        FROZEN[0] = len(sys.modules)


@pytest.fixture(scope="module")
def light_heap() -> None:
    """The same with what tests before these have left, and with what the first optimizer would import."""
    import torch._dynamo  # noqa: F401  # most of the heap

    gc.collect()
    gc.freeze()


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Any wait for the GPU inside is an error."""

    def debug(mode: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode(mode)

    torch.cuda.synchronize()
    debug("error")
    try:
        yield
    finally:
        debug("default")


@pytest.fixture
def no_waits() -> Callable[[], AbstractContextManager[None]]:
    return nothing_waits


@dataclass(frozen=True)
class Task:
    """A small classification task that is the same each time it is asked for."""

    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def dataset(self) -> TensorDataset:
        return TensorDataset(self.inputs, self.targets)

    def loader(self, batch_size: int = 16, *, shuffle: bool = True, **options: object) -> DataLoader:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(self.dataset, batch_size, shuffle=shuffle, generator=generator, **options)

    def model(self, *, dropout: float = 0.0) -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


@pytest.fixture
def task() -> Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(103, 6, generator=generator)  # a prime, so that every batch size leaves a tail
    return Task(inputs, inputs[:, :3].argmax(1))


@pytest.fixture
def sgd() -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
