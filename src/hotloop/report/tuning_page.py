"""A tuning as a page."""

from functools import partial

from hotloop.plan import Tuning
from hotloop.printing.text import count, duration
from hotloop.report import words
from hotloop.report.document import Block, Document, Table
from hotloop.report.plots import themed
from hotloop.report.runs import Run
from hotloop.report.tuning import cells_of, tuning_words, waterfall
from hotloop.report.words import Fact, times


def tuning_page(tuning: Tuning, command: str | None = None) -> str:
    """The way from the plain loop to the plan."""
    header = ["lever", "tier", "times", "±", "step", "verdict", "why"]
    caption = "Tier A: the same numbers. B: other rounding. C: other training."
    alt = "From the plain loop to the plan, a bar for the gain of each lever"
    blocks: list[Block] = [
        themed("From the plain loop to the plan", alt, partial(waterfall, tuning)),
        Table("Every lever", header, [list(cells_of(trial)) for trial in tuning.trials], caption, (0, 5, 6)),
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
        when=words.when(tuning.made),
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
