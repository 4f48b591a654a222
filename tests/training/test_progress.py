"""What a person sees while a run is under way."""

import io
import os
import re
import signal
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console

from hotloop.records import Epoch
from hotloop.training.progress import Display, Stop

DONE = Epoch(number=1, loss=0.51234, items=1000, seconds=2.0, losses={}, metrics={"accuracy": 0.975})


def shown(*, terminal: bool, show: bool | None = None) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120)
    with Display(2, 10, show, console) as display:
        for _ in range(10):
            display.stretch(1, 1, 0.75, 1234.0)
        time.sleep(0.15)
        display.stretch(1, 1, 0.5, 1234.0)
        display.epoch(DONE)
    return file.getvalue()


def test_a_bar_in_a_terminal() -> None:
    text = shown(terminal=True)
    for part in ("epoch 1/2", "/20", "loss 0.5", "1,234 items/s", "left"):
        assert part in text


def test_a_line_per_epoch_elsewhere() -> None:
    assert shown(terminal=False) == "epoch 1/2  loss 0.5123  validation accuracy 0.975  500 items/s  2.00 s\n"


def test_a_line_that_is_too_long_for_the_terminal_breaks_between_two_figures() -> None:
    file = io.StringIO()
    with Display(4, 10, None, Console(file=file, force_terminal=True, color_system=None, width=80)) as display:
        display.epoch(replace(DONE, loss=2.031, metrics={"accuracy": 0.1279, "loss": 2.075}, items=255, seconds=1.25))
        display.say("not tuned: " + "the step changes what trials could not restore, " * 3)
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*\w", "\n", file.getvalue()).splitlines()]
    assert "epoch 1/4  loss 2.031  validation accuracy 0.1279, loss 2.075  204 items/s" in lines
    assert "  1.25 s" in lines
    (told,) = (i for i, line in enumerate(lines) if line.startswith("not tuned:"))
    assert all(len(line) <= 80 for line in lines[told:])
    assert lines[told].endswith(("the", "step", "changes", "what", "trials", "could", "not", "restore,"))


def test_silence() -> None:
    assert shown(terminal=False, show=False) == ""
    assert shown(terminal=True, show=False) == ""


def test_a_bar_begins_where_an_earlier_part_of_the_run_has_ended() -> None:
    file = io.StringIO()
    with Display(2, 10, None, Console(file=file, force_terminal=True, width=120), done=12) as display:
        assert display._bar is not None
        display._bar.refresh()
        time.sleep(0.15)
        display.stretch(1, 2, 0.5, 1234.0)
        (task,) = display._bar.tasks
        assert task.completed == 13
        assert task.speed is None, "twelve batches in no time are not a speed"
    assert set(re.findall(r"(\d+)/20", file.getvalue())) == {"12", "13"}


def test_a_signal_is_asked_for_once_and_the_first_is_the_reason() -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    stop = Stop()
    with stop.listening(terminate=True):
        assert not stop.asked
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.why == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_at_once_is_once() -> None:
    stop = Stop()
    with stop.listening(terminate=True), stop.at_once():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # while it is being dealt with
    assert stop.why == "SIGTERM"


def test_the_death_of_a_child_interrupts_nothing_after_that() -> None:
    def complain(signum: int, frame: object) -> None:
        raise RuntimeError("a worker was killed")

    before = signal.signal(signal.SIGCHLD, complain)
    try:
        stop = Stop()
        with stop.listening(terminate=True):
            with pytest.raises(RuntimeError):
                signal.raise_signal(signal.SIGCHLD)
            os.kill(os.getpid(), signal.SIGTERM)
            signal.raise_signal(signal.SIGCHLD)
        assert signal.getsignal(signal.SIGCHLD) is complain
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_in_another_thread_nothing_is_listened_to() -> None:
    seen: list[object] = []

    def listen() -> None:
        with Stop().listening(terminate=True):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
