"""A `Diagnosis` as words for a terminal and as a page."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from hotloop.apps.doctor.diagnosis import Diagnosis, Finding
from hotloop.printing.text import count, duration, plural, printable, shorten
from hotloop.report.document import Block, Document, Fact, Patch, Table, Words
from hotloop.report.runs import Run
from hotloop.report.words import when

HEADERS = ("---", "+++")  # of a file in a diff


def diagnosis_words(diagnosis: Diagnosis) -> Group:
    """The answer first, then each finding with its fix, then what was tried in vain."""
    parts: list[RenderableType] = [Text(printable(lead(diagnosis)), style="bold")]
    shown = [each for each in diagnosis.findings if each.verdict != "no gain"]
    for number, finding in enumerate(shown, 1):
        style = "green" if finding.verdict == "confirmed" else "yellow"
        parts += [Text(), Text(printable(f"{number}  {finding.where}  {result(finding)}"), style=style)]
        words: list[RenderableType] = [Text(printable(finding.what)), Text(f"fix: {printable(finding.fix)}")]
        changed = [
            line for line in finding.diff.splitlines() if line.startswith(("-", "+")) and line[:3] not in HEADERS
        ]
        words += [Text(printable(line), style="green" if line[0] == "+" else "red") for line in changed]
        words += [Text(printable(said), style="dim") for said in (finding.why, finding.losses) if said][:1]
        parts.append(Padding(Group(*words), (0, 0, 0, 3), expand=False))
    if in_vain := [f"{each.rule} ({each.where})" for each in diagnosis.findings if each.verdict == "no gain"]:
        parts += [Text(), Text(printable(f"tried without gain: {shorten(in_vain)}"), style="dim")]
    if notes := [Text(printable(note), style="dim") for note in diagnosis.notes]:
        parts += [Text(), *notes]
    return Group(*parts)


def lead(diagnosis: Diagnosis) -> str:
    """The answer in two sentences."""
    name, helpful = Path(diagnosis.script).name, diagnosis.confirmed
    said = f"{name}: a step takes {duration(diagnosis.step)} on {diagnosis.device_name}"
    if diagnosis.waited >= 0.05:
        said += f", {diagnosis.waited:.0%} of it waiting for data"
    if not helpful:
        return f"{said}. {_in_vain(diagnosis)}"
    fixes = plural(len(helpful), "fix helps", "fixes help")
    if diagnosis.together is not None:
        return f"{said}. {fixes}; together: {diagnosis.together}."
    return f"{said}. {fixes}: {result(helpful[0])}."


def _in_vain(diagnosis: Diagnosis) -> str:
    tried = sum(each.gain is not None for each in diagnosis.findings)
    asked = plural(len(diagnosis.checked), "rule")
    suspects = sum(each.verdict == "not verified" for each in diagnosis.findings)
    if suspects:
        return f"Of {asked}, {suspects} found something that was not verified."
    if tried:
        return f"Of {asked}, {tried} found something, and the fix brought nothing."
    return f"{asked} found nothing to repair."


def result(finding: Finding) -> str:
    """What a fix gave, in a few words."""
    if finding.verdict == "confirmed" and finding.gain is not None:
        where = (
            " on top of the fixes above" if finding.on_top else " in the evaluation" if finding.of_evaluation else ""
        )
        return f"{finding.gain}{where}"
    return finding.verdict


def diagnosis_page(diagnosis: Diagnosis, *, command: str | None = None) -> str:
    """The whole page."""
    blocks: list[Block] = []
    if diagnosis.diff:
        fixes = "The confirmed fix" if diagnosis.fixes == 1 else f"{diagnosis.fixes} confirmed fixes"
        blocks.append(Patch(fixes, diagnosis.diff, "Beside this page as fixes.patch, for patch -p1 or git apply."))
    rows = [
        [each.where, f"{each.what} ({each.rule}, tier {each.tier})", each.fix, _whole_result(each)]
        for each in diagnosis.findings
    ]
    if rows:
        blocks.append(Table("Findings", ["where", "what was found", "fix", "result"], rows, words=(0, 1, 2, 3)))
    for finding in diagnosis.findings:
        if finding.diff and finding.verdict != "confirmed":
            blocks.append(Patch(f"{finding.rule}, {finding.where}: {finding.verdict}", finding.diff, finding.why))
    blocks.append(Words("How it was measured", [*diagnosis.notes, *method(diagnosis)]))
    return Document(
        f"What slows {Path(diagnosis.script).name} down",
        blocks,
        list(_headlines(diagnosis)),
        lead(diagnosis),
        command=command,
        versions=diagnosis.versions,
        when=when(diagnosis.date),
    ).html()


def diagnosis_run(diagnosis: Diagnosis) -> Run:
    """The entry among the runs that are kept."""
    figures = {"step in seconds": diagnosis.step, "findings": float(len(diagnosis.findings))}
    title = Path(diagnosis.script).name
    return Run("doctor", title, diagnosis.date, diagnosis.device_name or diagnosis.device, figures)


def method(diagnosis: Diagnosis) -> list[str]:
    """How the gains were measured, and what they do not say."""
    steps = f"{plural(diagnosis.steps, 'step')} after {diagnosis.warmup} of warm-up"
    return [
        f"Each turn is a run of the script in a process of its own, timed for {steps}, with everything between steps.",
        "Turns without and with each fix alternate. A fix is confirmed if its turns are faster, or need less memory, "
        "by more than noise explains (a rank test, 5%), and if the losses agree. Where the noise hides a gain, there "
        "are up to twice as many turns.",
        "A fix of tier A may change losses in the last digits. One of tier B changes the rounding: its first 20 losses "
        "may differ by 2% of their size on average. A few steps do not show how a long training converges.",
        "The doctor sets the seeds of Python, NumPy and PyTorch before the script begins, to make turns comparable.",
        f"Rules asked: {', '.join(diagnosis.checked)}.",
    ]


def _headlines(diagnosis: Diagnosis) -> Iterator[Fact]:
    of_steps = (each.gain for each in diagnosis.confirmed if not each.of_evaluation)
    gain = diagnosis.together or next(of_steps, None)
    if gain is not None:
        yield Fact(
            "with the confirmed fixes", f"{gain.times:.2f}×", f"{gain.least:.2f} to {gain.most:.2f} times as fast"
        )
        yield Fact("a step with them", duration(median(turn.step for turn in gain.after)), "the median turn")
    yield Fact("a step", duration(diagnosis.step), f"{diagnosis.waited:.0%} of it waiting for data")
    yield Fact("findings", count(len(diagnosis.findings)), f"{len(diagnosis.confirmed)} confirmed")
    yield Fact("device", diagnosis.device, diagnosis.device_name)


def _whole_result(finding: Finding) -> str:
    said = finding.verdict if finding.verdict != "confirmed" else f"confirmed: {result(finding)}"
    if finding.verdict == "no gain" and finding.gain is not None:
        said += f": {finding.gain}"
    return "; ".join(filter(None, (said, finding.why or finding.losses)))
