"""What a person reads of a simulation: the largest batch, what limits it, what helps, and cards side by side."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rich.console import Console

from hotloop.apps.simulate.compare import row_of
from hotloop.apps.simulate.largest_batch import SearchResult, Variant
from hotloop.apps.simulate.shown import cards_table, ranked, simulation_words
from hotloop.apps.simulate.simulation_record import Batch, DeviceFinding, Peak, Simulation, StepPace, StepTime

GIB = 2**30
FOUND = Simulation(
    gpu="t4",
    steps=3,
    completed=3,
    peak=Peak(6 * GIB, 7 * GIB, 8 * GIB),
    categories={"activations": 5 * GIB},
    fits=True,
    largest_batch=96,
    step_ms=StepTime(100.0, 80.0, 125.0, calibrated=False),
    batch=Batch(32, "argument:--batch", 32),
    search=SearchResult(96, 97, 6, "activations (12.0 GiB) at train.py:31", ((96, True, 1), (97, False, None))),
    helps=(Variant("plain", "as it is", 8 * GIB, 96), Variant("bf16", "autocast to bf16", 5 * GIB, 180)),
)


def said(parts: Iterable[Any]) -> str:
    console = Console(width=200, record=True, file=None, quiet=False, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def test_the_largest_batch_what_limits_it_and_what_helps() -> None:
    words = said(simulation_words(FOUND, "Tesla T4", "train.py", row_of(FOUND, {"t4": 0.36})))
    assert "the largest batch is 96: 97 does not fit" in words
    assert "what fills the memory: activations (12.0 GiB) at train.py:31" in words
    assert "autocast to bf16: 5.0 GiB instead of 8.0 GiB, and a batch of 180 instead of 96 fits" in words
    assert "320 (256 to 400) samples a second" in words
    assert "$0.312 (0.25 to 0.391) for a million samples, at $0.36 an hour" in words


def test_changes_that_do_not_help_are_named() -> None:
    plain, half = FOUND.helps
    words = said(
        simulation_words(replace(FOUND, helps=(plain, replace(half, batch=96, peak=8 * GIB))), "Tesla T4", "train.py")
    )
    assert "none of these takes less memory: autocast to bf16" in words


def test_a_search_without_an_end_says_so() -> None:
    for search, words in [
        (SearchResult(65536, None, 9, "", ()), "the largest batch is at least 65,536: no larger one was tried"),
        (SearchResult(None, 1, 4, "parameters (3.0 GiB)", ()), "not even a batch of 1 fits"),
        (SearchResult(None, None, 0, "", (), "why"), "no batch was seen to fit"),
    ]:
        assert words in said(simulation_words(replace(FOUND, search=search), "Tesla T4", "train.py"))


def test_cards_side_by_side() -> None:
    short = replace(
        FOUND, gpu="l4", fits=False, step_ms=None, search=SearchResult(None, 1, 3, "", ()), largest_batch=None
    )
    told = [FOUND, short]
    words = said([cards_table(told, ["Tesla T4", "\x1b[31mL4"], [row_of(one, {"t4": 0.36}) for one in told])])
    heading, first, second = words.splitlines()
    assert [each in heading for each in ("largest batch", "samples/s", "for a million")] == [True] * 3
    assert first.split()[:6] == ["Tesla", "T4", "yes", "8.0", "GiB", "96"]
    assert "320 (256 to 400)" in first
    assert "$0.312 (0.25 to 0.391)" in first
    assert " no " in second
    assert "\x1b" not in second
    plain = said([cards_table([replace(FOUND, search=None)], ["Tesla T4"], [row_of(replace(FOUND, batch=None))])])
    assert "largest" not in plain
    assert "million" not in plain


def test_the_pace_and_what_limits_it_and_what_was_not_measured() -> None:
    slow = StepTime(250.0, 200.0, 300.0, calibrated=False)
    paced = replace(FOUND, pace=StepPace(slow, 480.0, 20.0, 2, "data"))
    words = said(simulation_words(paced, "Tesla T4", "train.py", row_of(paced)))
    assert "with data and host work, a step every 250 ms (200 ms to 300 ms)" in words
    assert "measured on this machine: batches take 480 ms each step by 2 workers" in words
    assert "the data limits" in words
    assert "128 (107 to 160) samples a second" in words  # of the pace
    other = replace(FOUND, gpu="h200", pace=StepPace(slow, 0.0, 0.0, 0, "device"))
    names = {"t4": "Tesla T4", "h200": "NVIDIA H200"}
    assert "100 ms*" in said([cards_table([paced, other], [*names.values()], [row_of(paced), row_of(other)])])
    assert "Too close to rank" in ranked([row_of(paced), row_of(other)], names)
    quick = replace(other, pace=StepPace(StepTime(10.0, 9.0, 11.0, calibrated=True), 0.0, 0.0, 0, "device"))
    assert "By speed: H200; then Tesla T4" in ranked([row_of(paced), row_of(quick)], names)


def test_a_script_that_failed_has_no_verdict_in_words() -> None:
    failed = Simulation(
        "t4", 3, 0, "failed", findings=(DeviceFinding("failed", "error", "shown", "a.py", 0, "", "no", ""),)
    )
    words = said(simulation_words(failed, "Tesla T4", "a.py", row_of(failed)))
    assert "no verdict: the script failed" in words
    assert "error a.py: no" in words
    assert "fits" not in words
    assert "failed" in said([cards_table([failed], ["Tesla T4"], [row_of(failed)])])
