"""Tunings: every lever is told of, in words, in a table and in a picture."""

import math
import re
from dataclasses import replace
from io import BytesIO, StringIO

import pytest
from matplotlib import rcParams
from PIL import Image
from rich.console import Console
from rich.table import Table

from hotloop.plan import Plan, Trial, Tuning
from hotloop.report.plots import DARK
from hotloop.report.tuning import half_spread, tuning_table, tuning_words, waterfall
from hotloop.report.words import times

from ..thorough import some

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


def shown(table: Table, width: int = 80, *, colour: bool = False) -> str:
    file = StringIO()
    Console(width=width, file=file, force_terminal=colour, no_color=True, highlight=False).print(table)
    return file.getvalue()


def size_of(png: bytes) -> tuple[int, int]:
    with Image.open(BytesIO(png)) as image:
        image.load()
        return image.size


def test_the_sentence_names_the_gain_what_was_kept_and_the_cost() -> None:
    sentence = tuning_words(made_tuning())
    assert sentence == f"{times(8.2)} the plain loop: resident data, CUDA graph; tuned in 3.20 s"


def test_the_sentence_claims_nothing_that_was_not_measured() -> None:
    assert tuning_words(ODD["nothing kept"]).startswith("the plain loop stays: none of 3 levers")
    assert "no lever was tried" in tuning_words(ODD["nothing tried"])
    unmeasured = tuning_words(ODD["nothing timed"])
    assert "not timed" in unmeasured
    assert times(1.0)[-1] not in unmeasured


def test_every_lever_is_in_the_table_with_its_verdict_and_its_reason() -> None:
    text = shown(tuning_table(made_tuning()), width=140)
    for trial in made_tuning().trials:
        line = next(line for line in text.splitlines() if line.strip().startswith(trial.lever))
        assert trial.verdict in line
        assert trial.why in line


def test_the_table_goes_from_the_plain_loop_to_the_plan() -> None:
    lines = [line for line in shown(tuning_table(made_tuning())).splitlines() if re.search(r"\w", line)]
    assert "plain loop" in lines[1]
    assert "8.2 ms" in lines[1]
    assert "the plan" in lines[-2]
    assert times(8.2) in lines[-2]


@pytest.mark.parametrize("tuning", ODD.values(), ids=ODD)
def test_80_columns_hold_whatever_was_tried(tuning: Tuning) -> None:
    text = shown(tuning_table(tuning))
    assert max(map(len, text.splitlines())) <= 80
    for trial in tuning.trials:
        assert trial.lever[:12] in text


def test_without_colour_kept_rows_are_bold_and_untried_ones_dim() -> None:
    lines = shown(tuning_table(made_tuning()), colour=True).splitlines()
    assert "\x1b[1m" in next(line for line in lines if "resident data" in line)
    assert "\x1b[2m" in next(line for line in lines if "channels_last" in line)
    assert not re.search(r"\x1b\[(?:\d+;)*3\d", "\n".join(lines))


def test_text_from_outside_cannot_steer_the_terminal_nor_be_read_as_markup() -> None:
    text = shown(tuning_table(made_tuning((replace(KEPT[0], lever="[red]x\x1b[2J", why="[/]"),))))
    assert "\x1b" not in text
    assert "[red]x" in text
    assert "[/]" in text


def test_the_same_tuning_gives_the_same_picture_which_shows_the_verdicts_and_the_theme() -> None:
    before = dict(rcParams)
    two, five = KEPT, KEPT + REST[:3]
    changed = (replace(KEPT[0], verdict="dropped"), *KEPT[1:])
    pictures = [waterfall(made_tuning(trials)) for trials in (two, two, changed, five)]
    pictures.append(waterfall(made_tuning(two), DARK))
    assert pictures[0] == pictures[1]
    assert len(set(pictures)) == 4
    small, large = size_of(pictures[0]), size_of(pictures[3])
    assert small[0] == large[0] == 1800
    assert large[1] > small[1], "each lever that was tried has a row"
    assert dict(rcParams) == before


# The picture is the same for all kinds of tunings that are not here, or is drawn in `test_pages.py`.
@pytest.mark.parametrize("name", some(ODD, ["nothing tried", "far slower", "far faster", "no numbers"]))
def test_odd_tunings_still_give_a_picture(name: str) -> None:
    assert size_of(waterfall(ODD[name]))[0] == 1800


def test_ratios_and_spreads_that_are_not_known_say_so_or_stay_away() -> None:
    assert times(None) == times(math.nan) == "unknown"
    assert half_spread(0.0, 0.0, 0.0) == half_spread(None, 1.0, 2.0) == ""
