"""A `Report` as people see it: its page, its summary in the terminal, its entry among the runs that are kept."""

import math
from collections.abc import Iterator, Mapping, Sequence

from rich.panel import Panel

from hotloop.printing.text import count, duration, metric, plural, size
from hotloop.records import Epoch, Report, epoch_rows
from hotloop.report.document import Block, Document, Drawing, Fact, Facts, Gallery, Table, Words, panel
from hotloop.report.runs import Run
from hotloop.report.words import UNKNOWN, when


def page(
    trainings: Mapping[str, Report],
    *,
    title: str,
    lead: str = "",
    headlines: Sequence[Fact] | None = None,
    galleries: Sequence[Gallery] = (),
    command: str | None = None,
) -> str:
    """Trainings by name, "" for one alone, as one page; without `headlines` those of the last training."""
    reports = list(trainings.values())
    last = reports[-1]
    stopped = next((report for report in reports if report.interrupted), None)
    blocks: list[Block] = [Words(f"Why {last.device}?", [last.reason or UNKNOWN]), *galleries]
    for name, report in trainings.items():
        of = f": {name}" if name else ""
        blocks.append(Drawing(f"How it learned{of}", report.picture()))
        header, *rows = epoch_rows(report.epochs)
        if rows:
            blocks.append(Table(f"Epochs{of}", header, rows))
        blocks += [Facts("Where the time went", timings(report)), Facts("What ran", setting(report))]
    return Document(
        title,
        blocks,
        headlines_of(last) if headlines is None else headlines,
        lead,
        None if stopped is None else (f"Stopped by {stopper(stopped)}.", "These are the numbers up to there."),
        command,
        last.versions,
        when(reports[0].started),
    ).html()


def summary(report: Report, title: str = "the run") -> Panel:
    """The headline numbers of a run, in a frame."""
    shown = ("precision", "model", "peak memory on the device")
    facts = [*headlines_of(report), *(fact for fact in setting(report) if fact.label in shown)]
    return panel(facts, title, stopped=stopper(report) if report.interrupted else None)


def run_of(report: Report, title: str) -> Run:
    """The entry of a training."""
    return Run("train", title, report.started, report.device_name or report.device, figures_of(report))


def figures_of(report: Report, prefix: str = "") -> dict[str, float]:
    """What two trainings can be compared by."""
    scored = last_scored(report)
    figures: dict[str, float | None] = {
        "items per second": report.items_per_second,
        "seconds": report.seconds,
        "training loss": report.epochs[-1].loss if report.epochs else None,
        "peak memory in bytes": report.peak_memory,
        "energy for 1,000 items in joules": None if report.load is None else report.load.joules_per(report.watched),
        **{f"validation {name}": value for name, value in (scored.metrics if scored else {}).items()},
    }
    return {prefix + name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


def headlines_of(report: Report) -> list[Fact]:
    """The numbers that a person looks for first."""
    scored, name = last_scored(report), report.chief_metric
    facts = []
    if name is not None and scored is not None:
        facts.append(Fact(f"validation {name}", metric(name, scored.metrics[name]), f"after epoch {scored.number}"))
    if not report.epochs:
        facts.append(Fact("loss", UNKNOWN, "no epoch was begun"))
    elif scored is not None and "loss" in scored.metrics:
        trained = f"training {metric('loss', report.epochs[-1].loss)}"
        facts.append(Fact("validation loss", metric("loss", scored.metrics["loss"]), trained))
    else:
        facts.append(Fact("training loss", metric("loss", report.epochs[-1].loss), "mean of the last epoch"))
    rate = report.items_per_second
    of = "median of the epochs" if len(report.epochs) > 1 else ""
    facts.append(Fact("items per second", UNKNOWN if rate is None else count(rate), of))
    done = plural(len(report.epochs), "epoch") + (f", stopped by {stopper(report)}" if report.interrupted else "")
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
    tried = f"tried for {duration(report.tuning)}" if report.tuning else ""
    unknown = f"{report.device} does not tell" if report.peak_memory is None else ""
    return [
        Fact("device", report.device, report.device_name),
        Fact("precision", report.precision),
        Fact("levers", ", ".join(report.levers) or "none", tried),
        Fact("model", plural(report.parameters, "parameter")),
        Fact("peak memory on the device", size(report.peak_memory), unknown),
        Fact("updates skipped by the scaler", count(report.skipped)),
        *hardware(report),
        Fact("started", when(report.started)),
    ]


def hardware(report: Report) -> Iterator[Fact]:
    """What the run asked of the hardware, as far as it was looked at."""
    load = report.load
    if load is None or not load.samples:
        return
    for gpu in load.gpus:
        name = "GPU" if len(load.gpus) == 1 else f"GPU {gpu.index}"
        if gpu.utilisation is not None:
            high = gpu.utilisation_p95
            detail = "" if high is None else f"95% of the samples are at or below {high:.0f}%"
            yield Fact(f"{name} utilisation", f"{gpu.utilisation:.0f}%", detail)
        if gpu.throttled:
            yield Fact(f"{name} throttled", f"{gpu.throttled:.0%} of the time", ", ".join(gpu.reasons))
    if (joules := load.joules) is not None:
        each = load.joules_per(report.watched)
        detail = "" if each is None else f"{count(each)} J for 1,000 items"
        yield Fact("energy of the GPU" + "s" * (len(load.gpus) > 1), energy(joules), detail)
    if load.cpu is not None:
        yield Fact("CPU of the host", f"{load.cpu:.0f}%", "mean of all cores, whoever used them")


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
