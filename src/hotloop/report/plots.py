"""What pictures share: colours, units, and the bytes of an image file."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hotloop.report.document import Plot

Form = Literal["png", "svg"]
DENSITY = 200  # dots per inch: twice what a plain screen shows


@dataclass(frozen=True)
class Theme:
    """The colours of a plot."""

    text: str
    faint: str
    grid: str
    loss: str
    metric: str
    background: str

    @property
    def dark(self) -> bool:
        return self.background < "#8"


LIGHT = Theme(text="#1f2430", faint="#6b7280", grid="#e7e9ee", loss="#e8590c", metric="#0b7285", background="#ffffff")
DARK = Theme(text="#e6e8ee", faint="#9aa3b2", grid="#2b303b", loss="#ff8a4c", metric="#4cc9d8", background="#171a21")


def themed(title: str, alt: str, draw: Callable[[Theme, Form], bytes], caption: str = "") -> Plot:
    """A drawing for a page, by day and by night."""
    return Plot(title, alt, draw(LIGHT, "svg"), draw(DARK, "svg"), caption)


def unit_for(n: float) -> tuple[float, str]:
    """The binary unit that suits a number of bytes.

    >>> unit_for(3 * 2**20)
    (1048576.0, 'MiB')
    """
    power = min(int(math.log(max(n, 1), 1024)), 4)
    return 1024.0**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]


def encoded(figure: Figure, form: Form = "png") -> bytes:
    """A figure as the bytes of a file, without the date, so that the same run gives the same picture."""
    file = BytesIO()
    metadata = {"Software": None} if form == "png" else {"Date": None}
    figure.savefig(file, format=form, dpi=DENSITY, metadata=metadata)
    return file.getvalue()


def dress(axes: Axes, theme: Theme) -> None:
    axes.set_facecolor(theme.background)
    axes.grid(axis="y", color=theme.grid, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(colors=theme.faint, length=0, labelsize=9)
    for side in axes.spines.values():
        side.set_visible(False)
