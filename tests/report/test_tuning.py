"""Tunings: every lever is told of, in words, in a table and in a picture."""

import math
import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from hotloop.plan import Plan, Trial, Tuning
from hotloop.report.tuning import not_tried, tuning_page, tuning_run, tuning_table, tuning_words
from hotloop.report.words import half_spread, times

from ..thorough import some
from .reading import Reader

KEPT = (
    Trial("resident data", "A", "kept", "it fits", gain=4.1, low=4.0, high=4.2, step=2e-3),
    Trial("CUDA graph", "A", "kept", "it pays after 40 steps", gain=2.0, low=1.9, high=2.1, step=1e-3, cost=0.4),
)
REST = (
    Trial("bf16", "B", "dropped", "slower", gain=0.8, low=0.7, high=0.9, step=1.2e-3),
    Trial("compile", "B", "dropped", "2 min to compile, saves 9 s in the 4,000 steps of the run", gain=1.3),
    Trial("fused optimizer", "B", "dropped", "it raised an error"),
    Trial("channels_last", "B", "not tried", "no convolution"),
    Trial("cudnn benchmark", "A", "not tried", "no convolution"),
)


def made_tuning(trials: tuple[Trial, ...] = KEPT + REST) -> Tuning:
    return Tuning(
        plan=Plan(device="cuda"),
        trials=trials,
        plain_step=8.2e-3,
        step=1e-3,
        steps=4000,
        seconds=3.2,
        device_name="Test GPU",
        model="Net",
        made="2026-01-02T03:04:05+00:00",
        versions={"torch": "2.13.0"},
    )


ODD = {
    "nothing kept": replace(made_tuning(REST), step=8.2e-3),
    "nothing dropped": made_tuning(KEPT),
    "nothing tried": replace(made_tuning(REST[3:]), step=8.2e-3),
    "no lever": made_tuning(()),
    "nothing timed": replace(
        made_tuning(tuple(Trial(trial.lever, "A", trial.verdict, "") for trial in KEPT + REST)),
        plain_step=None,
        step=None,
    ),
    "far slower": made_tuning((*KEPT, replace(REST[0], gain=1e-3, low=None, high=None))),
    "far faster": replace(made_tuning((replace(KEPT[0], gain=1e6, low=None, high=None),)), step=8.2e-9),
    "no numbers": made_tuning((replace(KEPT[0], gain=math.nan), replace(KEPT[1], gain=0.0, low=math.inf))),
    "long words": made_tuning(tuple(replace(trial, lever="long" * 20, why="why $x_1$ " * 50) for trial in REST)),
}


def shown(tuning: Tuning, width: int = 80, *, colour: bool = False) -> str:
    file = StringIO()
    table = tuning_table(tuning).in_terminal(wraps=(0, 6))
    Console(width=width, file=file, force_terminal=colour, no_color=True, highlight=False).print(table)
    return file.getvalue()


def test_the_sentence_names_the_gain_what_was_kept_and_the_cost() -> None:
    sentence = tuning_words(made_tuning())
    assert sentence == f"{times(8.2)} the plain loop: resident data, CUDA graph; tuned in 3.20 s"


def test_the_sentence_claims_nothing_that_was_not_measured() -> None:
    assert tuning_words(ODD["nothing kept"]).startswith("the plain loop stays: none of 3 levers")
    assert "no lever was tried" in tuning_words(ODD["nothing tried"])
    unmeasured = tuning_words(ODD["nothing timed"])
    assert "not timed" in unmeasured
    assert times(1.0)[-1] not in unmeasured


def test_every_lever_that_was_tried_is_in_the_table_and_the_others_stand_by_their_reason() -> None:
    text = shown(made_tuning(), width=140)
    for trial in (*KEPT, *REST[:3]):
        line = next(line for line in text.splitlines() if line.strip().startswith(trial.lever))
        assert trial.verdict in line
        assert trial.why in line
    assert "channels_last" not in text
    assert list(not_tried(made_tuning())) == ["not tried, no convolution: channels_last, cudnn benchmark"]


def test_the_table_goes_from_the_plain_loop_to_the_plan() -> None:
    lines = [line for line in shown(made_tuning()).splitlines() if re.search(r"\w", line)]
    assert "plain loop" in lines[1]
    assert "8.2 ms" in lines[1]
    assert "the plan" in lines[-2]
    assert times(8.2) in lines[-2]


@pytest.mark.parametrize("tuning", ODD.values(), ids=ODD)
def test_80_columns_hold_whatever_was_tried(tuning: Tuning) -> None:
    text = shown(tuning)
    assert max(map(len, text.splitlines())) <= 80
    for trial in tuning.trials:
        assert trial.lever[:12] in text or trial.verdict == "not tried"


def test_without_colour_kept_rows_are_bold() -> None:
    lines = shown(made_tuning(), colour=True).splitlines()
    assert "\x1b[1m" in next(line for line in lines if "resident data" in line)
    assert not re.search(r"\x1b\[(?:\d+;)*3\d", "\n".join(lines))


def test_text_from_outside_cannot_steer_the_terminal_nor_be_read_as_markup() -> None:
    text = shown(made_tuning((replace(KEPT[0], lever="[red]x\x1b[2J", why="[/]"),)))
    assert "\x1b" not in text
    assert "[red]x" in text
    assert "[/]" in text


def test_ratios_and_spreads_that_are_not_known_say_so_or_stay_away() -> None:
    assert times(None) == times(math.nan) == "unknown"
    assert half_spread(0.0, 0.0, 0.0) == half_spread(None, 1.0, 2.0) == ""


HOSTILE = "<script>alert(1)</script>"


@pytest.mark.parametrize("name", some(ODD, ["nothing timed", "no numbers", "far faster", "long words"]))
def test_odd_tunings_have_a_page(name: str) -> None:
    tuning = ODD[name]
    page = Reader(tuning_page(tuning, "hotloop tune train.py:build"))
    assert all(trial.lever in page.text for trial in tuning.trials)
    assert all(address.startswith("data:") for address in page.addresses)


def test_hostile_words_are_shown_as_words() -> None:
    html = tuning_page(replace(made_tuning(()), model=HOSTILE), HOSTILE)
    assert "script" not in Reader(html).tags
    assert HOSTILE in Reader(html).text


def test_entries_hold_what_can_be_compared() -> None:
    assert list(tuning_run(ODD["nothing timed"]).figures) == ["tuning in seconds"]
