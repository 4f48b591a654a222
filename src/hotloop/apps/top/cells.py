"""Numbers and foreign strings as the screen says them: what is unknown is a dash, and no name steers the terminal."""

from hotloop.printing.text import printable, size

UNKNOWN = "–"
LONGEST = 2000  # characters of a foreign string that are looked at; no screen shows more


def tame(foreign: str | None) -> str:
    """A foreign string on one line that steers nothing, "–" where there is none.

    >>> tame("python" + chr(10) + "train.py"), tame(None), tame("  ")
    ('python\\\\ntrain.py', '–', '–')
    """
    return " ".join(printable((foreign or "")[:LONGEST]).split()) or UNKNOWN


def number(value: float | None, unit: str = "") -> str:
    """A whole number with its unit.

    >>> number(1755.2, " MHz"), number(87, "%"), number(None, " MHz")
    ('1,755 MHz', '87%', '–')
    """
    return UNKNOWN if value is None else f"{value:,.0f}{unit}"


def amount(n: float | None) -> str:
    """Bytes in the unit that suits them."""
    return UNKNOWN if n is None else size(n)


def rate(n: float | None) -> str:
    """Bytes a second."""
    return UNKNOWN if n is None else f"{size(n)}/s"


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
    return None if some is None or not whole else 100 * some / whole


def age(seconds: float | None) -> str:
    """How old something is, in one short unit or two.

    >>> age(42), age(750), age(11100), age(190000), age(None)
    ('42 s', '12 min', '3 h 5 m', '2 d 4 h', '–')
    """
    if seconds is None or seconds < 0:  # a clock that was set back tells nothing
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} m"
    return f"{minutes // 1440:,} d {minutes // 60 % 24} h"
