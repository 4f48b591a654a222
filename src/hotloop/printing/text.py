"""Numbers and foreign strings as people read them."""

import math
import re
import textwrap
import unicodedata

COMMAND = re.compile(r"`[^`]+`")


def size(n: float | None) -> str:
    """Bytes in binary units.

    >>> size(1536), size(None)
    ('1.5 KiB', 'unknown')
    """
    if n is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def duration(seconds: float | None) -> str:
    """A length of time, in the unit that suits it.

    >>> duration(0.00042), duration(3.2), duration(75), duration(300), duration(7300)
    ('420 µs', '3.20 s', '1 min 15 s', '5 min', '2 h 1 min')
    """
    if seconds is None:
        return "unknown"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = {"h": hours, "min": minutes} if hours else {"min": minutes, "s": rest}
    return " ".join(f"{number} {unit}" for unit, number in parts.items() if number)


def count(n: float) -> str:
    """A count or a rate with thousands separated, and no digits that mean nothing.

    >>> count(1234567), count(12.34)
    ('1,234,567', '12.3')
    """
    return f"{n:,.0f}" if abs(n) >= 100 or n == int(n) else f"{n:.3g}"


def metric(name: str, value: float | None) -> str:
    """A metric's value; an accuracy between 0 and 1 in percent.

    >>> metric("accuracy", 0.9931), metric("error", 0.25), metric("perplexity", 12345.6), metric("accuracy", None)
    ('99.3%', '0.2500', '1.235e+04', 'unknown')
    """
    if value is None:
        return "unknown"
    if not math.isfinite(value):
        return f"{value}"
    if "accuracy" in name.lower() and 0 <= value <= 1:
        return f"{value:.1%}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.4g}"


def plural(n: int, one: str, many: str | None = None) -> str:
    """A count and its noun.

    >>> plural(1, "GPU"), plural(3, "batch", "batches")
    ('1 GPU', '3 batches')
    """
    return f"{n} {one}" if n == 1 else f"{n:,} {many or one + 's'}"


def an(noun: str) -> str:
    """A noun with its article, such as the name of a type.

    >>> an("int"), an("list"), an("UNet")
    ('an int', 'a list', 'a UNet')
    """
    return f"an {noun}" if noun[:1] in set("aeioAEIO") else f"a {noun}"


def shorten(items: list[str], limit: int = 8) -> str:
    """A list for a sentence, cut where it stops being readable.

    >>> shorten(["a", "b", "c"], limit=2)
    'a, b and 1 more'
    """
    if len(items) <= limit:
        return ", ".join(items)
    return f"{', '.join(items[:limit])} and {len(items) - limit} more"


def error_in_a_line(error: BaseException) -> str:
    """The class of an error and the first line of its message.

    >>> error_in_a_line(ValueError("no such size\\nfix: another"))
    'ValueError: no such size'
    """
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def printable(foreign: str) -> str:
    """A string from outside, with everything that could steer a terminal replaced by its escape.

    >>> printable("ok" + chr(27) + "[2J")
    'ok\\\\x1b[2J'
    """
    return "".join(char.encode("unicode_escape").decode() if _steers(char) else char for char in foreign)


def _steers(char: str) -> bool:
    kind = unicodedata.category(char)
    return kind[0] == "C" or kind in ("Zl", "Zp")  # control, and the ends of lines and paragraphs


def clipped(words: str, limit: int) -> str:
    """Words from outside on one line, cut where their room ends.

    >>> clipped("as long as it is", 10)
    'as long a…'
    """
    line = printable(" ".join(words.split()))
    return line if len(line) <= limit else f"{line[: limit - 1].rstrip()}…"


def wrap(text: str, width: int, indent: str = "", *, hanging: str = "") -> list[str]:
    """Lines of at most `width`, except where one command or address is longer; no-break spaces become plain ones.

    >>> wrap("fix: run `unset CUDA_VISIBLE_DEVICES`", 24, hanging="  ")
    ['fix: run', '  `unset CUDA_VISIBLE_DEVICES`']
    """
    held = COMMAND.sub(lambda match: match[0].replace(" ", "\xa0"), text)
    lines = textwrap.wrap(
        held,
        max(width, 20),
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\xa0", " ") for line in lines]
