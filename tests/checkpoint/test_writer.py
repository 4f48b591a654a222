"""Writing in the background: values of the moment, no exception in training, nothing lost at the end."""

import errno
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hotloop.checkpoint import host_copies
from hotloop.checkpoint.damage import CheckpointWarning
from hotloop.checkpoint.folders import Summing
from hotloop.checkpoint.store import Store
from hotloop.checkpoint.writer import Writer
from hotloop.errors import BadArgument

from ..warm import Warm
from .trees import same


class Gate:
    """Holds every save up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        write = Store.write

        def held(store: Store, *arguments: Any, **options: Any) -> Path:
            self.reached.set()
            assert self._open.wait(20)
            return write(store, *arguments, **options)

        monkeypatch.setattr(Store, "write", held)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


def submitted(writer: Writer, step: int, tree: Any) -> bool:
    """Whether it was taken; what came of it is known by now."""
    taken = writer.submit(step, tree)
    writer.wait()
    return taken


def test_the_values_of_the_moment_are_saved(tmp_path: Path, gate: Gate) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    curve, store = [1.0], Store(tmp_path)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "curve": curve}
    before = torch.load(_saved(tmp_path / "expected", tree), weights_only=True)
    with Writer(store) as writer:
        assert writer.submit(1, tree, 0.5)
        with torch.no_grad():
            for tensor in [*model.state_dict().values(), *(s["exp_avg"] for s in optimizer.state.values())]:
                tensor.fill_(9)
        curve.append(2.0)
        gate.open()
    loaded = store.load_latest()
    assert (loaded.step, loaded.score, writer.written) == (1, 0.5, 1)
    assert same(loaded.tree, before)
    assert not [thread for thread in threading.enumerate() if thread.name == "hotloop-checkpoint"]


def _saved(path: Path, tree: Any) -> Path:
    torch.save(tree, path)
    return path


def test_a_save_that_comes_too_early_is_skipped(tmp_path: Path, gate: Gate) -> None:
    writer = Writer(Store(tmp_path))
    assert writer.submit(1, {"a": 1})
    assert gate.reached.wait(20)
    assert writer.busy
    assert not writer.submit(2, {"a": 2})
    assert not writer.submit(3, {"a": 3})
    gate.open()
    writer.wait()
    assert writer.problems == []
    assert writer.store.load_latest().step == 1


def test_a_save_that_waits_is_not_skipped(tmp_path: Path, gate: Gate) -> None:
    writer = Writer(Store(tmp_path))
    writer.submit(1, {"a": 1})
    threading.Timer(0.3, gate.open).start()
    assert writer.submit(2, {"a": 2}, wait=True)
    writer.close()
    assert writer.store.load_latest().step == 2


def test_what_cannot_be_submitted_is_an_error_at_once(tmp_path: Path) -> None:
    with Writer(Store(tmp_path)) as writer, pytest.raises(BadArgument, match="cannot hold schedule"):
        writer.submit(1, {"schedule": object()})


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    write = Summing.write

    def failing(self: Summing, data: memoryview | bytes) -> None:
        write(self, data[: max(0, after - self.sum.size)])
        if self.sum.size >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Summing, "write", failing)


@pytest.mark.parametrize("after", [0, 3, 100, 1000])
def test_a_full_disk_is_a_warning_and_the_next_save_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    store, tree = Store(tmp_path), {"w": torch.ones(1000)}
    with Writer(store) as writer:
        writer.submit(1, tree)
        writer.wait()
        with monkeypatch.context() as full:
            fill_the_disk(full, after)
            with pytest.warns(CheckpointWarning) as caught:
                assert [submitted(writer, step, tree) for step in (2, 3)] == [True, True]
        assert len(caught) == 1, "said once, not with every save"
        words = str(caught[0].message)
        assert all(part in words for part in ("No space left on device", "step 2", "the one of step 1 is kept", "fix:"))
        assert ["step 2" in writer.problems[0], "step 3" in writer.problems[1]] == [True, True]
        assert [each.name for each in tmp_path.iterdir()] == ["step-000000001"]
        writer.submit(4, tree)
        writer.wait()
        assert writer.written == 4
        with monkeypatch.context() as full:
            fill_the_disk(full, after)
            with pytest.warns(CheckpointWarning, match="the one of step 4 is kept"):
                submitted(writer, 5, tree)
    assert store.load_latest().step == 4


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    with Writer(Store(tmp_path / "run")) as writer:
        writer.submit(1, {})
        writer.wait()
        (tmp_path / "run").rename(tmp_path / "gone")
        writer.submit(2, {})
    assert writer.store.load_latest().step == 2
    assert writer.problems == []


def test_a_warning_that_is_an_error_does_not_end_the_training(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with warnings.catch_warnings(), Writer(Store(tmp_path / "run")) as writer:
        warnings.simplefilter("error")
        writer.submit(1, {})
        writer.wait()
    assert len(writer.problems) == 1


def test_no_memory_for_a_copy_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(host_copies, "_cloned", full)
    with Writer(Store(tmp_path)) as writer:
        with pytest.warns(CheckpointWarning, match="no memory for a copy"):
            assert not writer.submit(1, {"w": torch.ones(2)})
        assert len(writer.problems) == 1


def test_where_no_thread_can_be_had_it_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    writer = Writer(Store(tmp_path))
    assert writer.submit(1, {})
    assert writer.store.load_latest().step == 1


PROGRAM = """
import atexit, sys, time
import torch
from hotloop.checkpoint.store import Store
from hotloop.checkpoint.writer import Writer

writer = Writer(Store(sys.argv[1]))
if sys.argv[2] == "atexit":
    atexit.register(lambda: writer.submit(3, {"w": torch.ones(9)}))
else:
    write = Store.write
    Store.write = lambda *a, **k: (time.sleep(0.2), write(*a, **k))
    writer.submit(3, {"w": torch.ones(9)})
if sys.argv[2] == "error":
    raise RuntimeError("the training failed")
"""


@pytest.mark.parametrize(("end", "code"), [("normal", 0), ("error", 1), ("atexit", 0)])
def test_the_last_save_is_not_lost_when_the_program_ends(tmp_path: Path, end: str, code: int, warm: Warm) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(PROGRAM)
    done = warm.run(script, folder, end, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert Store(folder).load_latest().step == 3


@pytest.mark.gpu
def test_training_on_a_device_goes_on(tmp_path: Path, no_waits: Callable[[], AbstractContextManager[None]]) -> None:
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    inputs = torch.randn(8, 64, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(inputs).square().mean().backward()
        optimizer.step()

    def tree() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "state": torch.get_rng_state()}

    with Writer(Store(tmp_path)) as writer:
        step()
        writer.submit(0, tree())
        writer.wait()  # streams and pinned memory exist from now on
        for number in range(1, 4):
            expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            torch.cuda.synchronize()
            with no_waits():
                torch.cuda._sleep(100_000_000)
                assert writer.submit(number, tree())
                for _ in range(20):
                    step()
            writer.wait()
            assert writer.store.load_latest().step == number
            loaded = writer.store.load_latest().tree
            assert same(dict(loaded["model"]), {name: tensor.cpu() for name, tensor in expected.items()})
    assert writer.problems == []
