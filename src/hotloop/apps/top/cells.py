"""Words and numbers for a terminal: foreign strings made harmless, everything fitted to a number of cells."""

import math
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from hotloop.printing.text import printable, size

UNKNOWN = "–"
BETWEEN = " · "
LONGEST = 2000  # characters of a foreign string that are looked at; no screen shows more
IN_ASCII = str.maketrans(
    "–·─…▸°↓↑" + "░▏▎▍▌▋▊▉" + "▁▂▃▄▅▆▇█",
    "---.>'v^" + "...--==#" + "_,.-=+*#",
)  # for terminals that have nothing else


def tame(foreign: str | None) -> str:
    """A foreign string on one line that steers nothing, "–" where there is none.

    >>> tame("python" + chr(10) + "train.py"), tame(None), tame("  ")
    ('python\\\\ntrain.py', '–', '–')
    """
    return " ".join(printable((foreign or "")[:LONGEST]).split()) or UNKNOWN


def fit(text: str, cells: int) -> str:
    """The text cut to a number of cells, with an ellipsis where something is missing.

    >>> fit("python train.py", 8), fit("短い名前", 5)
    ('python…', '短い…')
    """
    if cells <= 0:
        return ""
    if cell_len(text) <= cells:
        return text
    return set_cell_size(text, cells - 1).rstrip() + "…"


def left(text: str, cells: int) -> str:
    """A column of exactly so many cells, filled up on the right."""
    return set_cell_size(fit(text, cells), max(cells, 0))


def right(text: str, cells: int) -> str:
    """A column of exactly so many cells, filled up on the left."""
    cut = fit(text, cells)
    return " " * (cells - cell_len(cut)) + cut


def cropped(line: Text, cells: int) -> Text:
    """The line, cut where it would be wider than the terminal."""
    if line.cell_len > cells:
        line.truncate(max(cells, 0), overflow="ellipsis" if cells > 1 else "crop")
    return line


def within(items: Iterable[str], cells: int) -> str:
    """As many items as fit on a line, the first ones first.

    >>> within(["1,755 of 1,980 MHz", "not throttled"], 24)
    '1,755 of 1,980 MHz'
    """
    line = ""
    for item in items:
        longer = line + BETWEEN + item if line else item
        if cell_len(longer) <= cells:
            line = longer
    return line


def wrapped(text: str, cells: int) -> list[str]:
    """Lines of at most so many cells, broken between words, and inside of one only where it fills a line by itself.

    >>> wrapped("the loop waits for data", 10)
    ['the loop', 'waits for', 'data']
    """
    lines = [""]
    for word in text.split():
        rest = word
        longer = f"{lines[-1]} {rest}" if lines[-1] else rest
        if cell_len(longer) <= cells:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        while cell_len(rest) > cells > 1:
            head = set_cell_size(rest, cells).rstrip()  # a wide character that does not fit becomes a space
            lines[-1] = head
            lines.append("")
            rest = rest[len(head) :]
        lines[-1] = rest
    return [line for line in lines if line]


def known(number: float | None) -> float | None:
    """The number, None also where it is not one."""
    return None if number is None or not math.isfinite(number) else number


def percent(share: float | None) -> str:
    """A percentage without decimals: `87%`."""
    return UNKNOWN if known(share) is None else f"{share:.0f}%"


def number(value: float | None, unit: str = "") -> str:
    """A whole number with its unit.

    >>> number(1755.2, " MHz"), number(None, " MHz")
    ('1,755 MHz', '–')
    """
    return UNKNOWN if known(value) is None else f"{value:,.0f}{unit}"


def amount(n: float | None) -> str:
    """Bytes in the unit that suits them."""
    return UNKNOWN if known(n) is None else size(n)


def portion(some: float | None, whole: float | None) -> str:
    """Bytes of so many bytes, both in the unit of the whole.

    >>> portion(700 * 2**20, 24 * 2**30), portion(None, 2**30), portion(2**30, None)
    ('0.7 of 24.0 GiB', '– of 1.0 GiB', '1.0 GiB')
    """
    used, total = known(some), known(whole)
    if used is None or not total:
        return part(amount(used), amount(total))
    figure, _, unit = size(total).partition(" ")
    scaled = used / 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)
    return f"{scaled:.1f} of {figure} {unit}"


def rate(n: float | None) -> str:
    """Bytes a second, to the digits that matter.

    >>> rate(1.3e9), rate(212e6), rate(None)
    ('1.2 GiB/s', '202 MiB/s', '–')
    """
    value = known(n)
    if value is None:
        return UNKNOWN
    figure, _, unit = size(value).partition(" ")
    return f"{round(float(figure)) if len(figure) > 4 else figure} {unit}/s"


def part(some: str, whole: str) -> str:
    """A part of a whole; a unit that both have is said once, and a whole that is not known not at all.

    >>> part("45.2 GiB", "141.0 GiB"), part("512 MiB", "8.0 GiB"), part("62 W", "–"), part("–", "700 W")
    ('45.2 of 141.0 GiB', '512 MiB of 8.0 GiB', '62 W', '– of 700 W')
    """
    if whole == UNKNOWN:
        return some
    figure, _, unit = some.partition(" ")
    return f"{figure if unit and whole.endswith(' ' + unit) else some} of {whole}"


def share(some: float | None, whole: float | None) -> float | None:
    """A part of a whole in percent, None where either is not known."""
    some, whole = known(some), known(whole)
    return None if some is None or not whole else 100 * some / whole


def age(seconds: float | None) -> str:
    """How old something is, in one short unit or two.

    >>> age(42), age(750), age(11100), age(190000), age(None)
    ('42 s', '12 min', '3 h 5 m', '2 d 4 h', '–')
    """
    lasted = known(seconds)
    if lasted is None or lasted < 0:  # a clock that was set back tells nothing
        return UNKNOWN
    if lasted < 60:
        return f"{lasted:.0f} s"
    minutes = int(lasted // 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} m"
    return f"{minutes // 1440:,} d {minutes // 60 % 24} h"


def in_encoding(lines: Sequence[Text], encoding: str) -> list[Text]:
    """The lines in characters that the terminal's encoding has, cell by cell."""
    return [line if _has(encoding, line.plain) else _translated(line, encoding) for line in lines]


def _translated(line: Text, encoding: str) -> Text:
    plain = "".join(char if _has(encoding, char) else char.translate(IN_ASCII) for char in line.plain)
    return Text(
        "".join(char if _has(encoding, char) else "?" for char in plain), style=line.style, spans=list(line.spans)
    )


def _has(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
