"""What a report says in words."""

import math
from dataclasses import replace

from hotloop.printing.text import metric
from hotloop.records import Epoch, Report, epoch_rows
from hotloop.report.document import Fact
from hotloop.report.training_page import headlines_of, setting, timings

from .reports import made_report


def value(facts: list[Fact], label: str) -> str:
    return next(fact.value for fact in facts if fact.label == label)


def test_the_headlines_are_those_of_the_last_epoch_that_was_evaluated() -> None:
    report = made_report()
    cut = Epoch(number=4, loss=0.4, items=200, seconds=0.1, losses={}, metrics={})
    facts = headlines_of(replace(report, epochs=(*report.epochs, cut), interrupted=True))
    accuracy = next(fact for fact in facts if fact.label == "validation accuracy")
    assert (accuracy.value, accuracy.detail) == ("83.3%", "after epoch 3")
    slow = replace(report, epochs=(replace(report.epochs[0], seconds=10.0), *report.epochs[1:]))
    assert value(headlines_of(slow), "items per second") == "4,000", "the median"
    assert "stopped by Ctrl-C" in next(fact.detail for fact in facts if fact.label == "time")


def test_a_run_without_any_epoch_says_unknown() -> None:
    empty = replace(made_report(), epochs=(), curve=(), steps=0, seconds=0.0)
    facts = headlines_of(empty)
    assert value(facts, "loss") == "unknown"
    assert value(facts, "items per second") == "unknown"
    assert value(timings(empty), "per update") == "unknown"
    assert len(list(epoch_rows(empty.epochs))) == 1
    assert (metric("accuracy", None), metric("accuracy", math.nan), metric("loss", math.inf)) == (
        "unknown",
        "nan",
        "inf",
    )
    assert metric("accuracy", 97.5) == "97.5000", "no share"


def test_memory_that_the_device_does_not_tell_is_unknown_never_zero() -> None:
    assert value(setting(made_report()), "peak memory on the device") == "unknown"
    assert value(setting(replace(made_report(), peak_memory=3 * 2**20)), "peak memory on the device") == "3.0 MiB"


def test_the_chief_metric_is_accuracy_else_the_first_that_is_not_the_loss() -> None:
    def with_metrics(metrics: dict[str, float]) -> Report:
        report = made_report()
        return replace(report, epochs=tuple(replace(epoch, metrics=metrics) for epoch in report.epochs))

    assert with_metrics({"f1": 0.5, "accuracy": 0.5}).chief_metric == "accuracy"
    assert with_metrics({"loss": 0.5, "f1": 0.5}).chief_metric == "f1"
    assert with_metrics({"loss": 0.5}).chief_metric is None
    assert with_metrics({}).chief_metric is None


def test_rows_have_a_cell_for_every_metric_of_any_epoch() -> None:
    report = made_report()
    mixed = (replace(report.epochs[0], metrics={}), replace(report.epochs[1], metrics={"f1": 0.5}))
    header, first, second = epoch_rows(mixed)
    assert header == ["epoch", "loss", "validation f1", "items/s", "time"]
    assert (first[2], second[2]) == ("unknown", "0.5000")
