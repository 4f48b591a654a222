"""Pages of benchmarks and tunings: everything is on them, and nothing is loaded."""

from dataclasses import replace

import pytest

from hotloop.report.pages import benchmark_page, benchmark_run, tuning_page, tuning_run

from ..thorough import some
from .reading import Reader
from .test_benchmark import made_benchmark, made_curves, made_score
from .test_tuning import ODD, made_tuning

HOSTILE = "<script>alert(1)</script>"


def test_a_benchmark_has_all_of_its_scores_on_the_page() -> None:
    html = benchmark_page(replace(made_benchmark(), curves=(made_curves(),), commit="abc123"))
    page = Reader(html)
    for expected in ("small CNN on cuda: images", "8.00×", "10,000", "did not run", "hotloop bench", "commit abc123"):
        assert expected in page.text
    assert "The same training: MLP on cpu" in page.text
    assert all(address.startswith("data:") for address in page.addresses)
    assert page.tags.count("table") == 2


def test_a_benchmark_that_timed_nothing_has_a_page() -> None:
    page = Reader(benchmark_page(replace(made_benchmark(()), ceilings={})))
    assert "it is not installed" in page.text
    assert "img" not in page.tags


@pytest.mark.parametrize("name", some(ODD, ["nothing timed", "long words"]))
def test_odd_tunings_have_a_page(name: str) -> None:
    tuning = ODD[name]
    page = Reader(tuning_page(tuning, "hotloop tune cnn"))
    assert all(trial.lever in page.text for trial in tuning.trials)
    assert all(address.startswith("data:") for address in page.addresses)


def test_hostile_words_are_shown_as_words() -> None:
    said = {"hardware": HOSTILE, "command": HOSTILE, "failures": (HOSTILE,)}
    benchmark = replace(made_benchmark((made_score(HOSTILE, "tutorial", 10.0),)), ceilings={}, **said)
    for html in (benchmark_page(benchmark), tuning_page(replace(made_tuning(()), model=HOSTILE), HOSTILE)):
        assert "script" not in Reader(html).tags
        assert HOSTILE in Reader(html).text


def test_entries_hold_what_can_be_compared() -> None:
    run = benchmark_run(made_benchmark())
    assert run.figures["small CNN on cuda, hotloop: images per second"] == 8000.0
    tuned = tuning_run(ODD["nothing timed"])
    assert list(tuned.figures) == ["tuning in seconds"]
