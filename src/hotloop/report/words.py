"""What pages and tables say in one way: values that are unknown, metrics, ratios, dates."""

import math
from datetime import datetime

UNKNOWN = "unknown"
TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"  # in place of what was not timed


def metric(name: str, value: float | None) -> str:
    """A metric's value; an accuracy between 0 and 1 in percent.

    >>> metric("accuracy", 0.9931), metric("error", 0.25), metric("perplexity", 12345.6), metric("accuracy", None)
    ('99.3%', '0.2500', '1.235e+04', 'unknown')
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if "accuracy" in name.lower() and 0 <= value <= 1:
        return f"{value:.1%}"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.4g}"


def times(ratio: float | None) -> str:
    """How many times as fast, with the digits that mean something.

    >>> [times(ratio)[:-1] for ratio in (0.789, 2.314, 15.06, 1542.6)]
    ['0.79', '2.31', '15.1', '1,543']
    """
    if ratio is None or not math.isfinite(ratio):
        return UNKNOWN
    digits = 2 if ratio < 9.995 else 1 if ratio < 99.95 else 0
    return f"{ratio:,.{digits}f}{TIMES}"


def half_spread(middle: float | None, low: float | None, high: float | None) -> str:
    """Half the way from the lowest to the highest as a share of the middle, and nothing where one is not known.

    >>> half_spread(2.0, 1.9, 2.1), half_spread(2.0, None, None)
    ('5%', '')
    """
    return f"{(high - low) / 2 / middle:.0%}" if middle and low is not None and high is not None else ""


def when(iso: str) -> str:
    """A time of day as people write it, and the text itself where it is not one.

    >>> when("2026-01-02T03:04:05+00:00"), when("yesterday")
    ('2026-01-02 03:04:05 UTC', 'yesterday')
    """
    try:
        return datetime.fromisoformat(iso).strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    except ValueError:
        return iso
