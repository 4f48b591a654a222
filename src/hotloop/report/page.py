"""A `Report` as one HTML page that needs nothing else: the pictures and the style are inside it."""

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

    @property
    def uri(self) -> str:
        return data_uri(self.png, "image/png")


def page(
    report: Report,
    *,
    title: str,
    lead: str = "",
    pictures: Sequence[Picture] = (),
    notes: Sequence[str] = (),
    command: str | None = None,
) -> str:
    """The whole page. It loads nothing from anywhere, and shows any text it is given as text."""
    header, *rows = words.rows(report)
    source = files("hotloop.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    # Past the extension rule of `select_autoescape`: everything here is HTML, so everything is escaped.
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(source)
    return template.render(
        report=report,
        title=title,
        lead=lead,
        started=words.when(report.started),
        headlines=words.headlines(report),
        timings=words.timings(report),
        setting=words.setting(report),
        header=header,
        rows=rows,
        curves=_curves(report),
        pictures=pictures,
        notes=notes,
        command=command,
    )


def data_uri(content: bytes, kind: str) -> str:
    """A file as an address that holds the file itself.

    >>> data_uri(b"hi", "text/plain")
    'data:text/plain;base64,aGk='
    """
    return f"data:{kind};base64,{b64encode(content).decode()}"


def _curves(report: Report) -> dict[str, str]:
    """The loss curve for wide and narrow windows, by day and by night."""
    return {
        f"{shape}_{light}": data_uri(loss_curve(report, "svg", theme, narrow=shape == "narrow"), "image/svg+xml")
        for shape in ("wide", "narrow")
        for light, theme in (("light", LIGHT), ("dark", DARK))
    }
