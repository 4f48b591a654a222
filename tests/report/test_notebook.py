"""What a notebook shows of a record: small, in the colours around it, and any text as text."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.device import Choice
from hotloop.device.facts import Cause
from hotloop.plan import Plan, Trial
from hotloop.printing import markup
from hotloop.profiling.profile_record import Line, OperationCost, Recommendation
from hotloop.records import BestEpoch

from .profiles import made_profile
from .reading import Reader
from .reports import made_report
from .test_tuning import made_tuning

HOSTILE = '<script>alert("1")</script>\'"><img src=x onerror=alert(1)>'
CAUSE = Cause("no-driver", "There is no NVIDIA driver.", "install one")
CHOICE = Choice(torch.device("cpu"), "fp32", "There is no GPU.", (CAUSE,), "Test CPU")
SHOWN: dict[str, tuple[object, list[str]]] = {
    "report": (made_report(), ["3 epochs", "Test CPU", "loss 1.5 → 0.5", "validation accuracy", "4,000"]),
    "plan": (Plan("cuda", precision="bf16", graph=16), ["cuda", "precision", "'bf16'", "graph", "16"]),
    "plain plan": (Plan("cpu"), ["cpu", "as usual"]),
    "tuning": (made_tuning(), ["A plan for Net", "8.2 times", "CUDA graph", "it pays after 40 steps", "not tried"]),
    "profile": (made_profile(), ["a step takes", "compute", "your line", "%"]),
    "choice": (CHOICE, ["cpu (Test CPU) in fp32", "There is no GPU.", "There is no NVIDIA driver.", "install one"]),
}


def html_of(record: object) -> str:
    show: Callable[[], str] = getattr(record, "_repr_html_")  # noqa: B009  # as a notebook looks for it
    return show()


@pytest.mark.parametrize(("record", "expected"), SHOWN.values(), ids=SHOWN)
def test_a_record_shows_what_its_summary_says_in_the_colours_around_it(record: object, expected: list[str]) -> None:
    html = html_of(record)
    text = Reader(html).text  # which also sees to it that tags close
    assert [each for each in expected if each not in text] == []
    assert len(html) < 40_000
    assert not re.search(r"(?<![-\w])(background-)?color:(?!var\(--hotloop|inherit)", html)
    assert not re.search(r"https?://|url\(|<script|<style|<link", html)
    assert repr(record) == str(record)  # which a prompt shows
    assert len(repr(record).splitlines()) <= 16
    assert len(repr(record)) < 1500


def test_text_from_outside_is_shown_as_text() -> None:
    line = Line(HOSTILE, 7, HOSTILE)
    report = made_report()
    hostile = [
        replace(
            report,
            device=HOSTILE,
            device_name=HOSTILE,
            precision=HOSTILE,
            stopped=HOSTILE,
            best=BestEpoch(1, HOSTILE, 0.5),
            epochs=tuple(replace(epoch, metrics={HOSTILE: 0.5}) for epoch in report.epochs),
        ),
        Plan("cuda", recompute=(HOSTILE,), levers=(HOSTILE,)),
        replace(made_tuning((Trial(HOSTILE, "A", "kept", HOSTILE),)), model=HOSTILE, device_name=HOSTILE),
        replace(
            made_profile(),
            device_name=HOSTILE,
            operations=(OperationCost(HOSTILE, HOSTILE, line, 1.0, 0.5, 1.0, HOSTILE),),
            advice=(Recommendation(HOSTILE, HOSTILE),),
        ),
        Choice(torch.device("cpu"), "fp32", HOSTILE, (Cause(HOSTILE, HOSTILE, HOSTILE),), HOSTILE),
    ]
    for record in hostile:
        html = html_of(record)
        assert "<script" not in html
        assert "<img" not in html
        assert "<script>alert" in Reader(html).text


def drawn(html: str) -> list[tuple[float, float]]:
    """Every place that a line of the picture goes through."""
    paths = re.findall(r' d="M([^"]*)"', html)
    return [tuple(map(float, place.split())) for path in paths for place in path.split("L")]  # type: ignore[misc]


def test_the_picture_has_the_loss_the_validation_and_the_metric() -> None:
    read = Reader(made_report().picture())
    assert read.tags.count("svg") == 2
    for words in ("loss", "training", "validation", "validation accuracy", "50%"):
        assert words in read.text
    longer = replace(made_report(), curve=tuple((batch, 2.0 / batch) for batch in range(1, 1001)))
    assert "smoothed" in longer.picture()
    assert len(longer.picture()) < 20_000


@settings(max_examples=60, deadline=None)
@given(losses=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=120), value=st.floats())
def test_any_losses_can_be_drawn(losses: list[float], value: float) -> None:
    curve = tuple(enumerate(losses, 1))
    epochs = tuple(replace(epoch, metrics={"loss": value, "error": value}) for epoch in made_report().epochs)
    html = replace(made_report(), curve=curve, epochs=epochs).picture()
    Reader(html)
    places = drawn(html)
    assert all(-1 <= x <= 1001 and -1 <= y <= 1001 for x, y in places)
    assert bool(places) == any(abs(loss) < markup.LARGEST for loss in losses)


def test_a_bar_is_never_longer_than_it_is() -> None:
    assert "width:100.00%" in markup.bar(7.0)
    assert "width:0.00%" in markup.bar(-1.0)
    assert "width:0.00%" in markup.bar(None)
    assert not math.isnan(float(re.findall(r"width:([\d.]+)%;height", markup.bar(0.5))[0]))
