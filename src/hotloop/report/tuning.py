"""How a plan was found, as a table, a sentence and a page."""

import math
from collections import defaultdict
from collections.abc import Iterator

from hotloop.plan import Trial, Tuning
from hotloop.printing.markup import bars
from hotloop.printing.text import count, duration, plural, printable
from hotloop.report.document import Block, Document, Drawing, Fact, Table, Words
from hotloop.report.runs import Run
from hotloop.report.words import DASH, TIMES, half_spread, times, when


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
    """Every lever that was tried, with what it gave and what became of it, from the plain loop to the plan."""
    tried = [trial for trial in tuning.trials if trial.verdict != "not tried"]
    rows = [
        ["plain loop", "", times(1.0), "", duration(tuning.plain_step), "", ""],
        *map(_cells, tried),
        ["the plan", "", times(tuning.gain), "", duration(tuning.step), "", f"tuned in {duration(tuning.seconds)}"],
    ]
    styles = {number: "bold green" for number, trial in enumerate(tried, 1) if trial.verdict == "kept"}
    caption = "tier A: the same numbers · B: other rounding · C: other training"
    header = ["lever", "tier", TIMES, "±", "step", "verdict", "why"]
    return Table("Every lever that was tried", header, rows, caption, (0, 1, 5, 6), {**styles, len(rows) - 1: "bold"})


def not_tried(tuning: Tuning) -> Iterator[str]:
    """The other levers, by the reason."""
    levers: dict[str, list[str]] = defaultdict(list)
    for trial in tuning.trials:
        if trial.verdict == "not tried":
            levers[trial.why].append(trial.lever)
    for why, names in levers.items():
        yield f"not tried, {why}: {', '.join(names)}" if why else f"not tried: {', '.join(names)}"


def _cells(trial: Trial) -> list[str]:
    """A lever as a row of the table; what was not timed is a dash."""
    gain = DASH if trial.gain is None else times(trial.gain)
    step = DASH if trial.step is None else duration(trial.step)
    spread = half_spread(trial.gain, trial.low, trial.high)
    return [trial.lever, trial.tier, gain, spread, step, trial.verdict, trial.why]


def tuning_page(tuning: Tuning, command: str | None = None) -> str:
    """The way from the plain loop to the plan."""
    timed = [(trial.lever, trial.gain, f"{times(trial.gain)} ({trial.verdict})") for trial in tuning.trials]
    gains = [("the plain loop", 1.0, times(1.0)), *timed, ("the plan", tuning.gain, times(tuning.gain))]
    drawn = [(name, gain, told) for name, gain, told in gains if gain is not None and math.isfinite(gain)]
    blocks: list[Block] = [
        Drawing("What each lever gave, against the best plan before it", bars(drawn)),
        tuning_table(tuning),
    ]
    if others := list(not_tried(tuning)):
        blocks.append(Words("The other levers", others))
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
    return Run.of("tune", tuning.model, tuning.made, tuning.device_name, figures)
