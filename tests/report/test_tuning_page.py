"""Pages of tunings: everything is on them, and nothing is loaded."""

from dataclasses import replace

import pytest

from hotloop.report.tuning_page import tuning_page, tuning_run

from ..thorough import some
from .reading import Reader
from .test_tuning import ODD, made_tuning

HOSTILE = "<script>alert(1)</script>"


@pytest.mark.parametrize("name", some(ODD, ["nothing timed", "long words"]))
def test_odd_tunings_have_a_page(name: str) -> None:
    tuning = ODD[name]
    page = Reader(tuning_page(tuning, "hotloop tune train.py:build"))
    assert all(trial.lever in page.text for trial in tuning.trials)
    assert all(address.startswith("data:") for address in page.addresses)


def test_hostile_words_are_shown_as_words() -> None:
    html = tuning_page(replace(made_tuning(()), model=HOSTILE), HOSTILE)
    assert "script" not in Reader(html).tags
    assert HOSTILE in Reader(html).text


def test_entries_hold_what_can_be_compared() -> None:
    assert list(tuning_run(ODD["nothing timed"]).figures) == ["tuning in seconds"]
