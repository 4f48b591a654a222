"""Trainings as one page."""

from collections.abc import Sequence
from dataclasses import dataclass

from hotloop.records import Report
from hotloop.report import words
from hotloop.report.document import Block, Document, Drawing, Facts, Gallery, Table, Words


@dataclass(frozen=True)
class Training:
    """A report under a title of its own."""

    title: str
    report: Report

    def blocks(self) -> list[Block]:
        report, name = self.report, f": {self.title}" if self.title else ""
        header, *rows = words.rows(report)
        learned = Drawing(f"How it learned{name}", report.picture())
        epochs = [Table(f"Epochs{name}", header, rows)] if rows else []
        timings = Facts("Where the time went", words.timings(report))
        return [learned, *epochs, timings, Facts("What ran", words.setting(report))]


def page(
    trainings: Sequence[Training],
    *,
    title: str,
    lead: str = "",
    headlines: Sequence[words.Fact] | None = None,
    galleries: Sequence[Gallery] = (),
    command: str | None = None,
) -> str:
    """The whole page; the last training is the one that its headlines are of."""
    last = trainings[-1].report
    stopped = next((training.report for training in trainings if training.report.interrupted), None)
    blocks: list[Block] = [Words(f"Why {last.device}?", [last.reason or words.UNKNOWN]), *galleries]
    for training in trainings:
        blocks += training.blocks()
    return Document(
        title,
        blocks,
        words.headlines(last) if headlines is None else headlines,
        lead,
        None if stopped is None else (f"Stopped by {words.stopper(stopped)}.", "These are the numbers up to there."),
        command,
        last.versions,
        words.when(trainings[0].report.started),
    ).html()
