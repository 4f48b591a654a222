"""JupyterLab in a real browser: the bar is one output that is drawn again, and records show themselves as tables."""

import pytest

from .jupyterlab import CHOICE, FIT, PLAN, PROFILE, TUNING, Shown, missing, show

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")


@pytest.fixture(scope="module")
def shown() -> Shown:
    return show()


def test_the_bar_is_drawn_again_in_its_place(shown: Shown) -> None:
    assert shown.errors == []
    running = [look for look in shown.looks if look.bars]
    assert {(look.outputs, look.bars) for look in running} == {(1, 1)}, "one output with one bar, not a line for each"
    told = [look.below for look in running if "batch" in look.below]
    assert len(set(told)) >= 5, "it moves"
    assert all("items/s" in words and "elapsed" in words for words in told)


def test_when_the_run_is_over_the_bar_is_gone_and_the_epochs_stay(shown: Shown) -> None:
    assert shown.looks[-1].bars == 0
    assert shown.looks[-1].outputs == 2, "the epochs, and the report that the cell ends with"
    assert shown.texts[FIT].count("validation accuracy") >= 2
    assert "6 epochs (750 steps)" in shown.texts[FIT]
    assert shown.pictures[FIT] == 2


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (FIT, "items/s"),
        (PLAN, "precision"),
        (CHOICE, "cpu"),
        (TUNING, "A plan for Sequential"),
        (PROFILE, "a step takes"),
    ],
)
def test_a_record_shows_its_table(shown: Shown, cell: int, words: str) -> None:
    assert words in shown.texts[cell]
    assert shown.tables[cell] >= 1
    assert "<div" not in shown.texts[cell], "markup, not text"
