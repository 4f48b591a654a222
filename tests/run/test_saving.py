"""`Loop.fit(save=…)`: when it saves, how it ends, and what it does with damage and with disks that are full."""

import contextlib
import json
import os
import random
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Sampler, TensorDataset

from hotloop import Loop, Report
from hotloop.checkpoint import folders
from hotloop.checkpoint.damage import CheckpointWarning, DamagedCheckpoint
from hotloop.checkpoint.reader import load
from hotloop.checkpoint.store import Store
from hotloop.errors import BadArgument, OutputError
from hotloop.run.intervals import interval_in, seconds_in
from hotloop.run.parts.checkpoint import Checkpoints
from hotloop.run.parts.epoch_losses import EpochRecords
from hotloop.run.state import LoopState
from hotloop.run.watch import Ending

from ..thorough import dealt
from ..warm import Warm
from .conftest import at_step, signalled

state_of = LoopState.state_dict
FILES = ("tensors.safetensors", "state.json", "sums.json")


def loop_of(task: Any, **options: Any) -> Loop:
    model = task.model(dropout=0.2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain", **options)


def fit(task: Any, folder: Path, *, loop: Loop | None = None, **options: Any) -> Report:
    """Seven steps for each epoch."""
    loop = loop or loop_of(task)
    return loop.fit(task.loader(16), save=folder, progress=False, **options)


def weights(loop: Loop) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in loop.model.parameters()]


def names(folder: Path) -> list[str]:
    beside = {".lock", "run.json", "report.html", "report.json"}
    return sorted(entry.name for entry in folder.iterdir() if entry.name not in beside)


# Words for times


NOT_TIMES = ["", "5", "min", "-5min", "5 parsecs", "500ms", "0s", "0 steps", "1.5 steps", "5min later", "nan s", "1e3s"]


@pytest.mark.parametrize("read", [seconds_in, interval_in])
def test_nonsense_is_no_time(read: Callable[[Any], Any]) -> None:
    for words in (*NOT_TIMES, 0, -1.0, float("nan"), True, None, [5], b"5min"):
        with pytest.raises(BadArgument, match="is not a duration") as refusal:
            read(words)
        assert "such as" in str(refusal.value.fix)


@pytest.mark.parametrize(("name", "value"), [("every", "often"), ("time_limit", "soon"), ("keep", 0)])
def test_nonsense_is_refused_before_anything_is_made(task, tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(BadArgument):
        fit(task, tmp_path / "run", **{name: value})
    assert not (tmp_path / "run").exists()


# When it is saved


def test_every_so_many_steps_the_last_of_them_and_the_end(task, tmp_path: Path) -> None:
    report = fit(task, tmp_path, epochs=2, every="1 step", keep=100)
    assert report.saved == 14
    steps = [int(name.removeprefix("step-")) for name in names(tmp_path)]
    assert steps[-1] == 14
    assert len(steps) >= 2, "a save that finds the last one still being written is left out, and is no error"
    assert 0 < report.saving < report.seconds
    assert report.stopped is None


def test_training_does_not_wait_for_a_save(task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    write = Store.write

    def blocked(self: Store, *arguments: Any, **options: Any) -> Path:
        assert release.wait(30)
        return write(self, *arguments, **options)

    monkeypatch.setattr(Store, "write", blocked)
    loop, asked = loop_of(task), []
    at_step(loop, 13, release.set)
    monkeypatch.setattr(LoopState, "state_dict", lambda state: asked.append(loop.steps) or state_of(state))
    report = fit(task, tmp_path, loop=loop, epochs=2, every="2 steps")
    assert report.steps == 14, "the save of step 2 was held up until step 12"
    assert asked[:2] == [0, 2]
    assert asked[2] >= 12, "nothing is gathered for a save that could not be written"
    assert report.saved == 14


def test_losses_that_arrive_late_are_in_the_checkpoint(task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where an epoch may have ended long before its losses reach the host."""
    monkeypatch.setattr(EpochRecords, "needs_epochs_now", property(lambda self: False, lambda self, value: None))
    monkeypatch.setattr(Ending, "landed", lambda self: False)
    report = fit(task, tmp_path, epochs=4, every="10 steps", keep=9)
    assert [epoch.number for epoch in report.epochs] == [1, 2, 3, 4]
    saved = [load(tmp_path / name).tree for name in names(tmp_path)]
    done = [tree["data"]["epoch"] for tree in saved]
    assert (done[0], done[-1]) == (1, 4)  # how many lie between them, the disk says
    assert [len(json.loads(tree["losses"]["history"].tobytes())) for tree in saved] == done


def test_only_the_last_few_and_the_best_stay(task, tmp_path: Path) -> None:
    report = fit(task, tmp_path, epochs=8, every="1h", keep=2, validate=task.loader(50))
    losses = [epoch.metrics["loss"] for epoch in report.epochs]
    best = Store(tmp_path).best()
    assert len(names(tmp_path)) <= 3
    saved = load(best)
    assert saved.score == min(losses)
    assert saved.tree["data"]["epoch"] == 1 + losses.index(min(losses))


def test_without_save_nothing_is_written(task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = loop_of(task).fit(task.loader(16), progress=False)
    assert names(tmp_path) == []
    assert (report.saved, report.saving, report.resumed) == (None, 0.0, 0)
    with pytest.raises(BadArgument, match="resume=True without save="):
        loop_of(task).fit(task.loader(), resume=True)


# Beginning and going on


def test_a_folder_with_a_run_is_refused_without_resume(task, tmp_path: Path) -> None:
    fit(task, tmp_path)
    before = names(tmp_path)
    with pytest.raises(BadArgument, match="an earlier run, the last of step 7") as refusal:
        fit(task, tmp_path)
    assert "resume=True" in str(refusal.value.fix)
    assert names(tmp_path) == before


def test_a_finished_run_gives_its_report_at_once(task, tmp_path: Path) -> None:
    first = fit(task, tmp_path, epochs=2, validate=task.loader(50))
    before = names(tmp_path)
    loop = loop_of(task)
    again = fit(task, tmp_path, loop=loop, epochs=2, validate=task.loader(50), resume=True)
    assert again.epochs == first.epochs
    assert (again.steps, again.curve, again.started) == (first.steps, first.curve, first.started)
    assert (again.resumed, again.interrupted, again.saved) == (1, False, 14)
    assert names(tmp_path) == before
    fewer = fit(task, tmp_path, epochs=1, resume=True)
    assert fewer.steps == 14, "what is done is done"


def test_what_cannot_be_the_same_is_told(task, tmp_path: Path) -> None:
    fit_until(task, tmp_path, 3)
    other = DataLoader(task.dataset, 20, shuffle=True, generator=torch.Generator().manual_seed(3))
    with pytest.warns(CheckpointWarning, match="the run may differ from one that never stopped: the last batch"):
        loop_of(task).fit(other, save=tmp_path, resume=True, progress=False)


def test_what_came_in_after_the_beginning_and_cannot_be_saved_is_told_once(
    task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, asked = loop_of(task), []
    at_step(loop, 2, lambda: loop._core.subject.optimizers[0].param_groups[0].update(note=object()))
    monkeypatch.setattr(LoopState, "state_dict", lambda state: asked.append(loop.steps) or state_of(state))
    with pytest.warns(CheckpointWarning) as told:
        report = fit(task, tmp_path, loop=loop, epochs=2, every="4 steps")
    assert asked == [0, 4, 8, 12, 14], "it is tried again when it is time for the next, not at every step"
    assert len(told) == 1
    assert "it is a builtins.object" in str(told[0].message)
    assert report.steps == 14


def test_what_cannot_be_saved_is_refused_before_the_training(task, tmp_path: Path) -> None:
    loop = loop_of(task)
    loop._core.subject.optimizers[0].param_groups[0]["note"] = object()
    with pytest.raises(BadArgument, match=r"optimizers\[0\].param_groups\[0\].note: it is a builtins.object"):
        fit(task, tmp_path, loop=loop)
    assert loop.steps == 0


@pytest.mark.filterwarnings("ignore:no optimizer of the loop holds")  # one that gets them later
@pytest.mark.parametrize("what", ["seen", "late", "has groups of 2 parameters here and of 2 + 2 in the checkpoint"])
def test_what_is_built_otherwise_during_training_is_told_once_when_it_is_saved(task, tmp_path: Path, what: str) -> None:
    def build() -> Loop:
        model = task.model()
        model.register_buffer("seen", torch.zeros(0))
        optimizer = torch.optim.Adam(model[0].parameters(), 0.01)
        return Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain")

    loop = build()

    def change(record: Any) -> None:
        if what == "seen":
            loop.model.seen = torch.cat([loop.model.seen, torch.ones(1)])
        elif what == "late" and record.step == 1:
            loop.model.register_buffer("late", torch.zeros(3))
        elif record.step == 1:
            loop._core.subject.optimizers[0].add_param_group({"params": loop.model[3].parameters()})

    with pytest.warns(CheckpointWarning) as told:
        fit(task, tmp_path, loop=loop, epochs=2, every="4 steps", on_step=change)
    (word,) = [str(each.message) for each in told if issubclass(each.category, CheckpointWarning)]
    assert "cannot resume from the checkpoint of step 4: " in word
    assert what in word
    with pytest.raises(BadArgument):
        fit(task, tmp_path, loop=build(), epochs=3, resume=True)


def test_a_learning_rate_that_stays_that_of_the_checkpoint_is_said(task, tmp_path: Path, capfd) -> None:
    fit(task, tmp_path, epochs=1)
    for rate, said in ((0.01, False), (0.5, True)):
        model = task.model(dropout=0.2)
        optimizer = torch.optim.Adam(model.parameters(), rate)
        loop = Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain")
        loop.fit(task.loader(16), epochs=2 + said, save=tmp_path, resume=True)
        words = "the optimizer keeps the settings of the checkpoint: lr=0.01, and not 0.5\n"
        assert (words in capfd.readouterr().err) == said
        assert optimizer.param_groups[0]["lr"] == 0.01


# Damage


def test_the_last_good_checkpoint_is_used(task, tmp_path: Path) -> None:
    """All kinds of damage are in `tests/checkpoint/test_reading.py`."""
    expected = loop_of(task)
    expected.fit(task.loader(16), epochs=3, progress=False)
    fit(task, tmp_path, epochs=1)
    fit(task, tmp_path, epochs=2, resume=True)
    os.truncate(tmp_path / "step-000000014" / FILES[0], 700)
    loop = loop_of(task)
    with pytest.warns(CheckpointWarning, match="step-000000014.*; step-000000007 is used instead"):
        report = fit(task, tmp_path, loop=loop, epochs=3, resume=True)
    assert report.resumed == 1
    assert all(map(torch.equal, weights(loop), weights(expected)))


def test_none_that_is_good_is_a_clear_error(task, tmp_path: Path) -> None:
    fit(task, tmp_path, epochs=1)
    fit(task, tmp_path, epochs=2, resume=True)
    for latest in tmp_path.glob("step-*"):
        os.truncate(latest / FILES[0], 700)
    loop = loop_of(task)
    before = weights(loop)
    with pytest.raises(
        DamagedCheckpoint, match=r"no checkpoint can be used: .*step-000000014.*step-000000007"
    ) as error:
        fit(task, tmp_path, loop=loop, epochs=3, resume=True)
    assert "start over in another folder" in str(error.value.fix)
    assert all(map(torch.equal, before, weights(loop)))


def test_a_checkpoint_of_something_that_is_no_run_is_refused(task, tmp_path: Path) -> None:
    Store(tmp_path).save(5, {"model": {"weight": torch.zeros(2)}})
    with pytest.raises(BadArgument, match=r"not one of Loop\.fit"):
        fit(task, tmp_path, resume=True)


# Disks


def test_a_disk_that_is_full_does_not_end_the_training(task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(task, tmp_path, epochs=1)
    real = folders.Summing.write

    def full(self: folders.Summing, data: Any) -> None:
        if self.sum.size > 500:
            raise OSError(28, "No space left on device")
        real(self, data)

    monkeypatch.setattr(folders.Summing, "write", full)
    loop = loop_of(task)
    with pytest.warns(CheckpointWarning) as told:
        report = fit(task, tmp_path, loop=loop, epochs=3, every="2 steps", resume=True)
    assert len(told) == 1, "once, not with every save"
    assert "No space left on device" in str(told[0].message)
    assert report.steps == 21
    assert report.saved == 7, "the old one stands"
    assert names(tmp_path) == ["step-000000007"]
    monkeypatch.undo()
    assert fit(task, tmp_path, epochs=3, resume=True).steps == 21


def test_a_place_that_cannot_be_written_to_is_told_at_once(task, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    loop = loop_of(task)
    for place in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(OutputError, match="checkpoints cannot be written to") as refusal:
            fit(task, place, loop=loop)
        assert refusal.value.fix
    assert loop.steps == 0


def test_no_room_at_all_is_told_at_once(task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hotloop.run.saving.tempfile.TemporaryFile", full)
    with pytest.raises(OutputError, match="No space left"):
        fit(task, tmp_path)
    assert names(tmp_path) == []


# The end


def fit_until(task: Any, folder: Path, step: int, signum: int = signal.SIGTERM, **options: Any) -> tuple[Report, Loop]:
    """A run that gets a signal in the middle of a step."""
    loop = options.pop("loop", None) or loop_of(task)
    at_step(loop, step, signalled(signum, options.pop("times", 1)))
    return fit(task, folder, loop=loop, **{"epochs": 3, "every": "1h"} | options), loop


@pytest.mark.parametrize(
    ("signum", "why", "times"),
    [(signal.SIGINT, "Ctrl-C", 1), (signal.SIGTERM, "SIGTERM", 1), (signal.SIGTERM, "SIGTERM", 2)],
)
def test_a_signal_saves_and_ends(task, tmp_path: Path, signum: int, why: str, times: int) -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    report, loop = fit_until(task, tmp_path, 10, signum, times=times, validate=task.loader(50))
    assert (report.interrupted, report.stopped, report.steps, report.saved) == (True, why, 10, 10)
    assert [epoch.items for epoch in report.epochs] == [103, 48]
    assert report.epochs[1].metrics == {}
    assert loop.model.training
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == handlers


def test_a_window_that_the_end_of_the_epoch_cuts_short_is_completed_too(task, tmp_path: Path) -> None:
    """The evaluation and a schedule that watches it are not forgotten there."""

    def build() -> Loop:
        model = task.model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = {"accumulate": 3, "scheduler": ReduceLROnPlateau(optimizer)}
        return Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan="plain", **options)

    report, _ = fit_until(task, tmp_path, 7, loop=build(), validate=task.loader(50))
    assert (report.steps, report.saved, len(report.epochs)) == (3, 3, 1)
    loop = build()
    again = fit(task, tmp_path, loop=loop, epochs=3, validate=task.loader(50), resume=True)
    assert [set(epoch.metrics) for epoch in again.epochs] == [{"loss"}] * 3
    assert loop._core.schedule.schedulers[0].last_epoch == 3


def test_before_the_first_batch_nothing_is_trained(task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_of(task)

    def interrupted(state: Any) -> dict[str, Any]:
        signal.raise_signal(signal.SIGTERM)
        return state_of(state)

    monkeypatch.setattr(LoopState, "state_dict", interrupted)  # which is asked for once everything is set up
    report = fit(task, tmp_path, loop=loop, epochs=3)
    assert (report.interrupted, report.stopped, report.steps, report.saved) == (True, "SIGTERM", 0, None)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("signum", "last"), dealt([signal.SIGINT, signal.SIGTERM], [False, True]))
def test_in_the_evaluation_it_is_done_when_the_run_goes_on(task, tmp_path: Path, signum: int, last: bool) -> None:
    left = [2 if last else 1]

    def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signum)
        return output.argmax(1) == target

    options = {"epochs": 2, "metrics": {"accuracy": accuracy}}
    expected = loop_of(task).fit(
        task.loader(16), validate=task.loader(103), progress=False, **options | {"metrics": {"accuracy": _accuracy}}
    )
    loop = loop_of(task)
    report = fit(task, tmp_path, loop=loop, validate=task.loader(103), **options)
    number = 2 if last else 1
    assert (report.interrupted, report.saved, len(report.epochs)) == (True, 7 * number, number)
    assert report.epochs[-1].metrics == {}
    assert loop.model.training
    again = fit(task, tmp_path, validate=task.loader(103), resume=True, **options)
    assert [epoch.metrics for epoch in again.epochs] == [epoch.metrics for epoch in expected.epochs]
    assert [epoch.loss for epoch in again.epochs] == [epoch.loss for epoch in expected.epochs]
    assert not again.interrupted
    calls = left[0]
    third = fit(task, tmp_path, validate=task.loader(103), resume=True, **options)
    assert third.epochs == again.epochs
    assert left[0] == calls, "what was evaluated is not evaluated again"
    best = Store(tmp_path).best()
    assert load(best).score == min(epoch.metrics["loss"] for epoch in again.epochs)


def _accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.argmax(1) == target


def test_ctrl_c_twice_ends_in_the_middle_and_leaves_the_last_checkpoint(task, tmp_path: Path) -> None:
    report, _ = fit_until(task, tmp_path / "a", 10, signal.SIGINT, times=2, every="4 steps")
    assert (report.interrupted, report.steps) == (True, 9)
    assert report.saved in range(4, 10), "nothing is saved of a step that was cut in two"
    expected = loop_of(task)
    expected.fit(task.loader(16), epochs=3, progress=False)
    resumed = loop_of(task)
    fit(task, tmp_path / "a", loop=resumed, epochs=3, resume=True)
    assert all(map(torch.equal, weights(resumed), weights(expected)))

    loop = loop_of(task)
    at_step(loop, 8, signalled(signal.SIGINT, 2), after=True)  # the first step of the second epoch
    report = fit(task, tmp_path / "b", loop=loop, epochs=3, every="1h")
    assert (report.interrupted, report.saved) == (True, None)


def test_after_everything_is_done_a_signal_is_no_interruption(
    task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loop_of(task)

    def late(state: Any) -> dict[str, Any]:
        if loop.steps == 7:
            signal.raise_signal(signal.SIGTERM)  # in the last save
        return state_of(state)

    monkeypatch.setattr(LoopState, "state_dict", late)
    report = fit(task, tmp_path, loop=loop, every="1h")
    assert (report.interrupted, report.stopped, report.saved) == (False, None, 7)


def test_a_time_limit(task, tmp_path: Path) -> None:
    report = fit(task, tmp_path, epochs=10**6, time_limit=0.3)
    assert (report.interrupted, report.stopped) == (True, "the time limit")
    assert 0.3 < report.seconds < 30
    assert report.saved == report.steps
    later = fit(task, tmp_path, epochs=10**6, time_limit=0.3, resume=True)
    assert later.steps > report.steps, "it counts from the start of each life"
    assert later.started == report.started
    assert later.seconds > report.seconds + 0.25
    assert later.saving > 0
    unsaved = loop_of(task).fit(task.loader(16), epochs=10**6, time_limit=0.1, progress=False)
    assert (unsaved.stopped, unsaved.saved) == ("the time limit", None)


def test_in_another_thread(task, tmp_path: Path) -> None:
    reports: list[Report] = []
    handler = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: reports.append(fit(task, tmp_path, every="1 step", time_limit="1h")))
    thread.start()
    thread.join()
    assert (reports[0].steps, reports[0].saved) == (7, 7)
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_that_were_ignored_stay_ignored(task, tmp_path: Path, signum: int) -> None:
    before = signal.signal(signum, signal.SIG_IGN)
    try:
        report, _ = fit_until(task, tmp_path, 3, signum, epochs=1)
        assert signal.getsignal(signum) is signal.SIG_IGN
    finally:
        signal.signal(signum, before)
    assert (report.interrupted, report.steps) == (False, 7)


class Telling(Sampler[int]):
    """A sampler whose state nothing but pickle could hold."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(32).tolist())

    def __len__(self) -> int:
        return 32

    def state_dict(self) -> dict[str, Any]:
        return {"more": object()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_sampler_that_cannot_be_saved_is_told_once_and_ends_no_run(
    task: Any, tmp_path: Path, evaluated: bool
) -> None:
    loader = DataLoader(TensorDataset(task.inputs[:32], task.targets[:32]), 8, sampler=Telling())
    validate = task.loader(16) if evaluated else None
    options = {"save": tmp_path, "every": "2 steps", "progress": False, "validate": validate}
    with pytest.warns(CheckpointWarning, match=r"samplers\[0\]") as told:
        report = loop_of(task).fit(loader, epochs=2, **options)
    assert len(told) == 1
    assert (report.steps, report.saved) == (8, None)


def test_a_signal_between_two_epochs_saves(task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Checkpoints.after_epoch

    def late(self: Checkpoints) -> None:
        plain(self)
        if self.run.epoch == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Checkpoints, "after_epoch", late)
    report = fit(task, tmp_path, epochs=5, every="1h")
    assert report.stopped == "SIGTERM"
    assert report.saved == report.steps > 0
    monkeypatch.undo()
    later = fit(task, tmp_path, epochs=5, every="1h", resume=True)
    assert [epoch.number for epoch in later.epochs] == [1, 2, 3, 4, 5]


def test_an_error_leaves_the_handlers_and_the_last_checkpoint(task, tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("mine")

    loop = loop_of(task)
    at_step(loop, 6, fail)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ValueError, match="mine"):
        fit(task, tmp_path, loop=loop, every="2 steps")
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert names(tmp_path)
    assert all(name.startswith("step-") for name in names(tmp_path)), "what was being written is finished"


PROGRAM = """
    import sys, threading, time
    import torch, hotloop
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Noise(Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.rand(4) + index, torch.ones(1)

    def main():
        torch.set_num_threads(1)
        model = nn.Linear(4, 1)
        data = DataLoader(Noise(), 8, num_workers=int(sys.argv[2]))
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", plan="plain")
        saving = {"save": sys.argv[1], "every": "1h", "resume": True} if sys.argv[1] else {}
        report = loop.fit(data, epochs=100000, **saving)
        print(report.stopped, report.steps, report.saved, report.resumed)

    if __name__ == "__main__":
        main()
"""


def killed(warm: Warm, where: Path, folder: str, signum: int, workers: int, seconds: float) -> tuple[int, str, str]:
    """A process group that trains and gets a signal, workers and all, as a scheduler sends it: how it ends."""
    script, out, err = (where / name for name in ("program.py", "out", "err"))
    script.write_text(textwrap.dedent(PROGRAM))
    for file in (out, err):
        file.unlink(missing_ok=True)
    process = warm.start(script, folder, str(workers), cwd=where, out=out, err=err, own_session=True)
    end = time.monotonic() + 120
    while not err.exists() or "\nepoch " not in f"\n{err.read_text()}":
        assert time.monotonic() < end, err.read_text()
        time.sleep(0.01)
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)
    code = process.wait()
    return code, out.read_text(), err.read_text()


def test_sigterm_to_the_whole_group_saves_although_it_kills_the_workers(tmp_path: Path, warm: Warm) -> None:
    before = 0
    for life in range(2):
        code, told, err = killed(warm, tmp_path, str(tmp_path / "run"), signal.SIGTERM, 2, 0.07 * life)
        assert code == 0, err
        why, steps, saved, resumed = told.split()
        assert (why, steps, int(resumed)) == ("SIGTERM", saved, life)
        assert int(steps) > before, "nothing is lost"
        before = int(steps)
        assert "Traceback" not in err


def test_sigterm_without_save_means_what_it_always_does_and_ctrl_c_ends_with_a_report(
    tmp_path: Path, warm: Warm
) -> None:
    code, told, _ = killed(warm, tmp_path, "", signal.SIGTERM, 0, 0)
    assert (code, told) == (-signal.SIGTERM, "")
    code, told, err = killed(warm, tmp_path, "", signal.SIGINT, 2, 0)  # as a terminal sends it: to the workers too
    assert code == 0, err
    assert told.startswith("Ctrl-C ")
    assert "Traceback" not in err


# Two runs and one folder

RUN = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from hotloop import Loop

class Slow(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.randn(3), torch.randn(1)

model = nn.Linear(3, 1)
loop = Loop(model, torch.optim.SGD(model.parameters(), 0.01), nn.MSELoss(), device="cpu", plan="plain")
loader = DataLoader(Slow(), 2, num_workers=2)
loop.fit(loader, save=sys.argv[1], every="1 step", keep=2, resume=True, progress=False)
"""


def small_loop() -> tuple[Loop, list[Any]]:
    model = nn.Linear(3, 1)
    loop = Loop(model, torch.optim.SGD(model.parameters(), 0.01), nn.MSELoss(), device="cpu", plan="plain")
    return loop, [(torch.randn(2, 3), torch.randn(2, 1)) for _ in range(4)]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_another_run_in_the_same_folder_is_noticed_and_its_death_too(tmp_path: Path, warm: Warm) -> None:
    folder, script = tmp_path / "run", tmp_path / "run.py"
    script.write_text(textwrap.dedent(RUN))
    run = warm.start(script, folder, cwd=tmp_path)
    end = time.monotonic() + 120
    while not list(folder.glob("step-*")):
        assert time.monotonic() < end
        time.sleep(0.01)
    loop, data = small_loop()
    for resume in (True, False):
        with pytest.raises(BadArgument, match=rf"another run saves into .*: process {run.pid}") as refusal:
            loop.fit(data, save=folder, resume=resume, progress=False)
        assert "choose another folder" in str(refusal.value.fix)
    os.kill(run.pid, signal.SIGKILL)  # its workers live on for a while
    assert run.wait() == -signal.SIGKILL, "the run went on"
    saved = Store(folder).load_latest()
    loop, data = small_loop()
    report = loop.fit(data * 100, save=folder, resume=True, progress=False)
    assert report.resumed == 1
    assert report.saved > saved.step


def test_a_run_inside_a_run_cannot_save_into_its_folder(tmp_path: Path) -> None:
    outer, data = small_loop()
    inner, _ = small_loop()
    plain, refusals = outer.step, []

    def nested(batch: Any) -> Any:
        with pytest.raises(BadArgument, match=r"another run saves into .*: this very process") as refusal:
            inner.fit(data, save=tmp_path, progress=False)
        refusals.append(refusal)
        return plain(batch)

    outer.step = nested
    outer.fit(data, save=tmp_path, progress=False)
    assert len(refusals) == len(data)
    assert inner.fit(data, epochs=2, save=tmp_path, resume=True, progress=False).resumed == 1


@pytest.mark.parametrize("left", ["", "\x00\xff", "12 " + "x" * 5000])
def test_a_lock_that_a_killed_run_left_is_no_obstacle(tmp_path: Path, left: str) -> None:
    (tmp_path / ".lock").write_text(left)
    loop, data = small_loop()
    assert loop.fit(data, save=tmp_path, progress=False).saved == len(data)
    with pytest.raises(BadArgument, match="holds the checkpoints of an earlier run"):
        loop.fit(data, save=tmp_path, progress=False)
    assert loop.fit(data, epochs=2, save=tmp_path, resume=True, progress=False).saved == 2 * len(data), "it was let go"


@pytest.mark.parametrize("saved", [True, False])
def test_a_run_is_resumed_where_gauss_has_a_number_left_and_where_it_has_none(saved: bool, tmp_path: Path) -> None:
    """The state of Python's generator then has another form."""
    for resume in (False, True):
        random.seed(0)
        if saved != resume:
            random.gauss()
        loop, batches = small_loop()
        report = loop.fit(batches, epochs=1 + resume, save=tmp_path, resume=resume, progress=False, monitor=False)
        assert len(report.epochs) == 1 + resume
