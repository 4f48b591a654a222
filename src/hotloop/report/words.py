"""What a `Report` says, as labels and values in words: the page and the terminal show the same ones."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from hotloop.printing.text import count, duration, plural, size
from hotloop.records import Epoch, Report

UNKNOWN = "unknown"
TIMES = "\N{MULTIPLICATION SIGN}"
DASH = "\N{EN DASH}"  # in place of what was not timed


@dataclass(frozen=True)
class Fact:
    """One labelled value, and what there is to add to it."""

    label: str
    value: str
    detail: str = ""


def headlines(report: Report) -> list[Fact]:
    """The numbers that a person looks for first."""
    scored = last_scored(report)
    name = report.chief_metric
    facts = []
    if name is not None and scored is not None:
        facts.append(Fact(f"validation {name}", metric(name, scored.metrics[name]), f"after epoch {scored.number}"))
    facts += [_loss(report), _speed(report)]
    done = "1 epoch" if len(report.epochs) == 1 else f"{len(report.epochs)} epochs"
    if report.interrupted:
        done += f", stopped by {stopper(report)}"
    facts.append(Fact("time", duration(report.seconds), done))
    facts.append(Fact("device", report.device, report.device_name or UNKNOWN))
    return facts


def stopper(report: Report) -> str:
    """What ended a run before its time."""
    return report.stopped or "Ctrl-C"


def timings(report: Report) -> list[Fact]:
    """Where the time went."""
    training = sum(epoch.seconds for epoch in report.epochs)
    rest = max(report.seconds - training, 0.0)
    per_update = training / report.steps if report.steps else None
    share = f"{rest / report.seconds:.0%} of the run" if report.seconds > 0 else ""
    facts = [
        Fact("training", duration(training), plural(report.steps, "update") + " of the weights"),
        Fact("evaluation and the rest", duration(rest), share),
        Fact("per update", duration(per_update), "mean over the whole run, its start included"),
    ]
    rates = [epoch.items_per_second for epoch in report.epochs if epoch.seconds > 0]
    if len(rates) > 1:
        spread = f"{count(min(rates))} to {count(max(rates))} items/s"
        facts.append(Fact("slowest to fastest epoch", spread, "the first one also warms up"))
    return facts


def setting(report: Report) -> list[Fact]:
    """What ran, and on what."""
    unknown = f"{report.device} does not tell" if report.peak_memory is None else ""
    return [
        Fact("device", report.device, report.device_name),
        Fact("precision", report.precision),
        Fact(
            "levers",
            ", ".join(report.levers) or "none",
            f"tried for {duration(report.tuning)}" if report.tuning else "",
        ),
        Fact("model", plural(report.parameters, "parameter")),
        Fact("peak memory on the device", size(report.peak_memory), unknown),
        Fact("updates skipped by the scaler", count(report.skipped)),
        *hardware(report),
        Fact("started", when(report.started)),
    ]


def hardware(report: Report) -> list[Fact]:
    """What the run asked of the hardware, as far as it was looked at."""
    load = report.load
    if load is None or not load.samples:
        return []
    facts = []
    for gpu in load.gpus:
        name = "GPU" if len(load.gpus) == 1 else f"GPU {gpu.index}"
        if gpu.utilisation is not None:
            high = gpu.utilisation_p95
            detail = "" if high is None else f"95% of the samples are at or below {high:.0f}%"
            facts.append(Fact(f"{name} utilisation", f"{gpu.utilisation:.0f}%", detail))
        if gpu.throttled:
            facts.append(Fact(f"{name} throttled", f"{gpu.throttled:.0%} of the time", ", ".join(gpu.reasons)))
    if (joules := load.joules) is not None:
        each = load.joules_per(report.watched)
        detail = "" if each is None else f"{count(each)} J for 1,000 items"
        facts.append(Fact("energy of the GPU" + "s" * (len(load.gpus) > 1), energy(joules), detail))
    if load.cpu is not None:
        facts.append(Fact("CPU of the host", f"{load.cpu:.0f}%", "mean of all cores, whoever used them"))
    return facts


def energy(joules: float) -> str:
    """Joules in the unit that suits them.

    >>> energy(420.0), energy(52_000.0), energy(7.2e6)
    ('420 J', '52.0 kJ', '2.00 kWh')
    """
    if joules < 10_000:
        return f"{count(joules)} J"
    return f"{joules / 1e3:.1f} kJ" if joules < 3.6e6 else f"{joules / 3.6e6:.2f} kWh"


def last_scored(report: Report) -> Epoch | None:
    """The last epoch that was evaluated."""
    return next((epoch for epoch in reversed(report.epochs) if epoch.metrics), None)


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


def when(iso: str) -> str:
    """A time of day as people write it, and the text itself where it is not one.

    >>> when("2026-01-02T03:04:05+00:00"), when("yesterday")
    ('2026-01-02 03:04:05 UTC', 'yesterday')
    """
    try:
        return datetime.fromisoformat(iso).strftime("%Y-%m-%d %H:%M:%S %Z").strip()
    except ValueError:
        return iso


def rows(report: Report) -> Iterator[list[str]]:
    """The table of epochs, its header first."""
    names = list(dict.fromkeys(name for epoch in report.epochs for name in epoch.scores))
    yield ["epoch", "loss", *names, "items/s", "time"]
    for epoch in report.epochs:
        scores = (metric(name, epoch.scores.get(name)) for name in names)
        speed = count(epoch.items_per_second) if epoch.seconds > 0 else UNKNOWN
        yield [str(epoch.number), metric("loss", epoch.loss), *scores, speed, duration(epoch.seconds)]


def _loss(report: Report) -> Fact:
    if not report.epochs:
        return Fact("loss", UNKNOWN, "no epoch was begun")
    scored = last_scored(report)
    if scored is not None and "loss" in scored.metrics:
        trained = f"training {metric('loss', report.epochs[-1].loss)}"
        return Fact("validation loss", metric("loss", scored.metrics["loss"]), trained)
    return Fact("training loss", metric("loss", report.epochs[-1].loss), "mean of the last epoch")


def _speed(report: Report) -> Fact:
    found = report.items_per_second
    if found is None:
        return Fact("items per second", UNKNOWN)
    return Fact("items per second", count(found), "median of the epochs" if len(report.epochs) > 1 else "")
