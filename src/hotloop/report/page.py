"""Trainings as one HTML page that needs nothing else: the pictures and the style are inside it."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from hotloop.records import Report
from hotloop.report import words
from hotloop.report.plots import DARK, LIGHT, loss_curve


@dataclass(frozen=True)
class Picture:
    """A picture for the page."""

    png: bytes
    caption: str
    alt: str  # what it shows, for those who cannot see it
    crisp: bool = False  # pixel art: enlarged without smoothing

    @property
    def uri(self) -> str:
        return data_uri(self.png, "image/png")


@dataclass(frozen=True)
class Gallery:
    """Pictures that belong together."""

    title: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Training:
    """A report under a title of its own."""

    title: str
    report: Report

    @property
    def timings(self) -> list[words.Fact]:
        return words.timings(self.report)

    @property
    def setting(self) -> list[words.Fact]:
        return words.setting(self.report)

    @property
    def table(self) -> list[list[str]]:
        return list(words.rows(self.report))

    @property
    def curves(self) -> dict[str, str]:
        """The loss curve for wide and narrow windows, by day and by night."""
        return {
            f"{shape}_{light}": data_uri(
                loss_curve(self.report, "svg", theme, narrow=shape == "narrow"), "image/svg+xml"
            )
            for shape in ("wide", "narrow")
            for light, theme in (("light", LIGHT), ("dark", DARK))
        }


def page(
    trainings: Sequence[Training],
    *,
    title: str,
    lead: str = "",
    headlines: Sequence[words.Fact] | None = None,
    galleries: Sequence[Gallery] = (),
    notes: Sequence[str] = (),
    command: str | None = None,
) -> str:
    """The whole page. It loads nothing from anywhere, and shows any text it is given as text."""
    source = files("hotloop.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    # Past the extension rule of `select_autoescape`: everything here is HTML, so everything is escaped.
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(source)
    last = trainings[-1].report
    return template.render(
        report=last,
        interrupted=any(training.report.interrupted for training in trainings),
        title=title,
        lead=lead,
        started=words.when(trainings[0].report.started),
        headlines=words.headlines(last) if headlines is None else headlines,
        trainings=trainings,
        galleries=galleries,
        notes=notes,
        command=command,
    )


def data_uri(content: bytes, kind: str) -> str:
    """A file as an address that holds the file itself.

    >>> data_uri(b"hi", "text/plain")
    'data:text/plain;base64,aGk='
    """
    return f"data:{kind};base64,{b64encode(content).decode()}"
