"""How a plan was found, as a picture, a table, a sentence and a page."""

import math
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from hotloop.plan import Trial, Tuning
from hotloop.printing.markup import bars
from hotloop.printing.text import count, duration, plural, printable
from hotloop.report import document
from hotloop.report.document import Block, Document, Drawing
from hotloop.report.run_summary import lined
from hotloop.report.runs import Run
from hotloop.report.words import DASH, TIMES, Fact, times, when


def half_spread(middle: float | None, low: float | None, high: float | None) -> str:
    """Half the way from the lowest to the highest as a share of the middle, and nothing where one is not known.

    >>> half_spread(2.0, 1.9, 2.1), half_spread(2.0, None, None)
    ('5%', '')
    """
    return f"{(high - low) / 2 / middle:.0%}" if middle and low is not None and high is not None else ""


def tuning_words(tuning: Tuning) -> str:
    """What the tuning gave, in a sentence."""
    kept = [printable(trial.lever) for trial in tuning.trials if trial.verdict == "kept"]
    tried = sum(trial.verdict != "not tried" for trial in tuning.trials)
    spent = f"tuned in {duration(tuning.seconds)}"
    if kept and tuning.gain is not None:
        return f"{times(tuning.gain)} the plain loop: {', '.join(kept)}; {spent}"
    if kept:
        return f"kept, by how much was not timed: {', '.join(kept)}; {spent}"
    if tried:
        return f"the plain loop stays: none of {plural(tried, 'lever')} made it faster; {spent}"
    return f"the plain loop stays: no lever was tried; {spent}"


def tuning_table(tuning: Tuning) -> Table:
    """Every lever with what it gave and what became of it, from the plain loop to the plan."""
    caption = "tier A: the same numbers · B: other rounding · C: other training"
    header = ["lever", "tier", TIMES, "±", "step", "verdict", "why"]
    table = lined(header, words=(0, 1, 5, 6), wraps=(0, 6), caption=caption)
    table.add_row("plain loop", "", times(1.0), "", duration(tuning.plain_step), end_section=True)
    styles = {"kept": "bold green", "dropped": "", "not tried": "dim"}
    for number, trial in enumerate(tuning.trials, 1):
        cells = [Text(cell, style="dim" if trial.verdict == "not tried" else "") for cell in cells_of(trial)]
        table.add_row(*cells, style=styles[trial.verdict], end_section=number == len(tuning.trials))
    spent = f"tuned in {duration(tuning.seconds)}"
    table.add_row("the plan", "", times(tuning.gain), "", duration(tuning.step), "", spent, style="bold")
    return table


def cells_of(trial: Trial) -> Iterator[str]:
    """A lever as a row of the table; what was not timed is a dash."""
    yield printable(trial.lever)
    yield trial.tier
    yield DASH if trial.gain is None else times(trial.gain)
    yield half_spread(trial.gain, trial.low, trial.high)
    yield _dash(trial.step)
    yield trial.verdict
    yield printable(trial.why)


def _dash(seconds: float | None) -> str:
    return DASH if seconds is None else duration(seconds)


def tuning_page(tuning: Tuning, command: str | None = None) -> str:
    """The way from the plain loop to the plan."""
    header = ["lever", "tier", "times", "±", "step", "verdict", "why"]
    caption = "Tier A: the same numbers. B: other rounding. C: other training."
    timed = [(trial.lever, trial.gain, f"{times(trial.gain)} ({trial.verdict})") for trial in tuning.trials]
    gains = [("the plain loop", 1.0, times(1.0)), *timed, ("the plan", tuning.gain, times(tuning.gain))]
    drawn = [(name, gain, told) for name, gain, told in gains if gain is not None and math.isfinite(gain)]
    blocks: list[Block] = [
        Drawing("What each lever gave, against the best plan before it", bars(drawn)),
        document.Table("Every lever", header, [list(cells_of(trial)) for trial in tuning.trials], caption, (0, 5, 6)),
    ]
    run = "unknown" if tuning.steps is None else count(tuning.steps)
    return Document(
        f"A plan for {tuning.model}",
        blocks,
        [
            Fact("faster", times(tuning.gain), "than the plain loop"),
            Fact("step", duration(tuning.step), f"plain {duration(tuning.plain_step)}"),
            Fact("tuned in", duration(tuning.seconds), f"for a run of {run} steps"),
            Fact("device", tuning.plan.device, tuning.device_name),
        ],
        tuning_words(tuning),
        command=command,
        versions=tuning.versions,
        when=when(tuning.made),
    ).html()


def tuning_run(tuning: Tuning) -> Run:
    """The entry of a tuning."""
    figures = {
        "step of the plan in seconds": tuning.step,
        "plain step in seconds": tuning.plain_step,
        "tuning in seconds": tuning.seconds,
    }
    known = {name: value for name, value in figures.items() if value is not None}
    return Run("tune", tuning.model, tuning.made, tuning.device_name, known)
