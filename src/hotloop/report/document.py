"""`Document`: what every page of hotloop is made of, and the one look that all of them share; tables in a terminal."""

from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, ClassVar, Literal

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.table import Table as RichTable
from rich.text import Text

from hotloop.printing.text import printable

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class Fact:
    """One labelled value, and what there is to add to it."""

    label: str
    value: str
    detail: str = ""


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
    styles: Mapping[int, str] = field(default_factory=dict)  # of rows, by their number, in a terminal
    kind: ClassVar = "table"

    def in_terminal(self, *, wraps: Collection[int] = (), cuts: Collection[int] = ()) -> RichTable:
        """The same between two lines; where it is narrow, columns take several lines or are cut short."""
        table = RichTable(
            box=box.HORIZONTALS,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            border_style="dim",
            header_style="dim",
            caption=self.caption,
            caption_justify="left",
        )
        for column, name in enumerate(self.header):
            side: Literal["left", "right"] = "left" if column in self.words else "right"
            table.add_column(name, justify=side, no_wrap=column not in (*wraps, *cuts), overflow="fold")
        for number, row in enumerate(self.rows):
            # Of a column that must not wrap, rich leaves out the rest; a cell alone gives way.
            cells = [
                Text(printable(cell), no_wrap=True, overflow="ellipsis") if column in cuts else Text(printable(cell))
                for column, cell in enumerate(row)
            ]
            table.add_row(*cells, style=self.styles.get(number, ""))
        return table


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


def panel(facts: Sequence[Fact], title: str, *, stopped: str | None = None) -> Panel:
    """Facts in a frame in the terminal, the first one in green; `stopped` is what ended the run before its time."""
    has_details = any(fact.detail for fact in facts)
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    if has_details:
        grid.add_column(style="dim", overflow="fold")
    for number, fact in enumerate(facts):
        value = Text(printable(fact.value), style="bold green" if number == 0 else "bold")
        grid.add_row(fact.label, value, *([Text(printable(fact.detail))] if has_details else []))
    told = f"Stopped by {stopped}: these are the numbers up to there.\n"
    shown = grid if stopped is None else Group(Text(told, style="yellow"), grid)
    return Panel(shown, title=Text(printable(title)), title_align="left", border_style="dim", expand=False)


@cache
def _template() -> "Template":
    """Compiled once: that takes longer than filling it in."""
    from jinja2 import Environment, StrictUndefined  # noqa: PLC0415  # a verb that writes no page does without

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
