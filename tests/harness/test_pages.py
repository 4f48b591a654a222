"""Pages of benchmarks: everything is on them, and nothing is loaded."""

from dataclasses import replace

from harness.pages import benchmark_page, benchmark_run

from ..report.reading import Reader
from .test_charts import made_benchmark, made_curves, made_score

HOSTILE = "<script>alert(1)</script>"


def test_a_benchmark_has_all_of_its_scores_on_the_page() -> None:
    html = benchmark_page(replace(made_benchmark(), curves=(made_curves(),), commit="abc123"))
    page = Reader(html)
    for expected in (
        "small CNN on cuda: images",
        "8.00×",
        "10,000",
        "did not run",
        "python -m harness",
        "commit abc123",
    ):
        assert expected in page.text
    assert "The same training: MLP on cpu" in page.text
    assert all(address.startswith("data:") for address in page.addresses)
    assert page.tags.count("table") == 2


def test_a_benchmark_that_timed_nothing_has_a_page() -> None:
    page = Reader(benchmark_page(replace(made_benchmark(()), ceilings={})))
    assert "it is not installed" in page.text
    assert "img" not in page.tags


def test_hostile_words_are_shown_as_words() -> None:
    said = {"hardware": HOSTILE, "command": HOSTILE, "failures": (HOSTILE,)}
    benchmark = replace(made_benchmark((made_score(HOSTILE, "tutorial", 10.0),)), ceilings={}, **said)
    html = benchmark_page(benchmark)
    assert "script" not in Reader(html).tags
    assert HOSTILE in Reader(html).text


def test_entries_hold_what_can_be_compared() -> None:
    run = benchmark_run(made_benchmark())
    assert run.figures["small CNN on cuda, hotloop: images per second"] == 8000.0
