"""What a person sees while a run is under way."""

import io
import time

from rich.console import Console

from hotloop.loop.progress import Display
from hotloop.records import Epoch

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


def test_silence() -> None:
    assert shown(terminal=False, show=False) == ""
    assert shown(terminal=True, show=False) == ""
