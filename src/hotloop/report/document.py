"""`Document`: what every page of hotloop is made of, and the one look that all of them share."""

from base64 import b64encode
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import ClassVar

from jinja2 import Environment, StrictUndefined, Template

from hotloop.report.words import Fact


@dataclass(frozen=True)
class Picture:
    """A picture for the page."""

    png: bytes
    caption: str
    alt: str  # what it shows, for those who cannot see it
    crisp: bool = False  # pixel art: enlarged without smoothing
    dark: bytes | None = None  # the same for a dark page, where it has a ground of its own

    @property
    def uri(self) -> str:
        return data_uri(self.png, "image/png")

    @property
    def dark_uri(self) -> str:
        return data_uri(self.dark or self.png, "image/png")


@dataclass(frozen=True)
class Gallery:
    """Pictures that belong together."""

    title: str
    pictures: Sequence[Picture]
    kind: ClassVar = "gallery"


@dataclass(frozen=True)
class Plot:
    """A drawing as SVG, by day and by night."""

    title: str
    alt: str
    light: bytes
    dark: bytes
    caption: str = ""
    kind: ClassVar = "plot"

    @property
    def uris(self) -> dict[str, str]:
        return {name: data_uri(svg, "image/svg+xml") for name, svg in (("light", self.light), ("dark", self.dark))}


@dataclass(frozen=True)
class Drawing:
    """Markup that was made by `hotloop.printing.markup`: it takes the page's colours, by day, by night and on paper."""

    title: str
    markup: str
    kind: ClassVar = "drawing"


@dataclass(frozen=True)
class Table:
    """Rows of cells under their names."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    words: Collection[int] = (0,)  # columns of words, which are set to the left and may take several lines
    kind: ClassVar = "table"


@dataclass(frozen=True)
class Facts:
    """Labelled values."""

    title: str
    facts: Sequence[Fact]
    kind: ClassVar = "facts"


@dataclass(frozen=True)
class Words:
    """Sentences, each a point of a list."""

    title: str
    sentences: Sequence[str]
    kind: ClassVar = "words"


@dataclass(frozen=True)
class Patch:
    """Changes of files, as `diff -u` writes them."""

    title: str
    diff: str
    caption: str = ""
    kind: ClassVar = "patch"

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Each line with what it is."""
        kinds = {"+++": "place", "---": "place", "+": "added", "-": "removed", "@": "place"}
        return [(kinds.get(line[:3]) or kinds.get(line[:1], "kept"), line) for line in self.diff.splitlines()]


Block = Gallery | Plot | Drawing | Table | Facts | Words | Patch


@dataclass(frozen=True)
class Document:
    """A page: headlines first, then its blocks, then how to get it again."""

    title: str
    blocks: Sequence[Block]
    headlines: Sequence[Fact] = ()
    lead: str = ""
    warning: tuple[str, str] | None = None  # what happened, and what that means for the numbers
    command: str | None = None
    versions: dict[str, str] | None = None
    when: str = ""
    origin: str = "measured"  # what was done to get the numbers

    def html(self) -> str:
        """The whole page. It loads nothing from anywhere, and shows any text it is given as text."""
        return _template().render(document=self)


@cache
def _template() -> Template:
    """Compiled once: that takes longer than filling it in."""
    source = files("hotloop.report").joinpath("document.html.j2").read_text(encoding="utf-8")
    # Past the extension rule of `select_autoescape`: everything here is HTML, so everything is escaped.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source)


def data_uri(content: bytes, kind: str) -> str:
    """A file as an address that holds the file itself.

    >>> data_uri(b"hi", "text/plain")
    'data:text/plain;base64,aGk='
    """
    return f"data:{kind};base64,{b64encode(content).decode()}"
