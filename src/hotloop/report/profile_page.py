"""A `Profile` as a page and as a short answer in the terminal."""

from collections.abc import Sequence

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from hotloop.printing.markup import bars, line, stacked
from hotloop.printing.text import clipped, count, duration, plural, printable, size
from hotloop.profiling.advice import has_kernels, part_words
from hotloop.profiling.profile_record import CATEGORIES, PARTS, Line, OperationCost, Profile
from hotloop.report.document import Block, Document, Drawing, Fact, Facts, Table, Words
from hotloop.report.runs import Run
from hotloop.report.words import UNKNOWN, when

MEANING = {
    "data": "the next batch was not ready",
    "copies": "between host and device, while nothing was computed",
    "waits": "the device had nothing to do, and the host was in a call that waits for it",
    "gaps": "the device had nothing to do, because the host had not prepared it yet",
    "communication": "with other processes, while nothing was computed",
    "compute": "the device worked",
}
ON_HOST = {"gaps": "interpreting, calling, everything that is no operation of PyTorch", "compute": "operations ran"}
CODE = 36  # characters of a line of code in a table
BAR, NAME, PATH = 30, 28, 28  # characters of the longest bar, operation and path in the terminal


def profile_page(profile: Profile, *, command: str | None = None) -> str:
    """The whole page, in the order of the questions: where the time goes, how far from the limits, which lines."""
    shares = profile.parts.shares
    drawn = [(part_words(name, profile.device), shares[name], f"{shares[name]:.1%}") for name in shown_parts(profile)]
    advice = [f"{each.what} Fix: {each.fix}." for each in profile.advice]
    blocks: list[Block] = [
        Drawing("Where a step's time went", bars(drawn, whole=1.0)),
        Table("In figures", ["part", "what it is", "share", "in a step"], parts_table(profile), words=(0, 1)),
        *([Words("What to do about it", advice)] if advice else []),
        Facts("How far the computing is from the device's ceilings", ceilings(profile)),
        _operations(profile),
        _waits(profile),
        *_memory(profile),
        Words("How it was measured", [*profile.notes, *method(profile)]),
    ]
    return Document(
        f"Where a step of {profile.name} spends its time",
        blocks,
        headlines(profile),
        lead(profile),
        command=command,
        versions=profile.versions,
        when=when(profile.date),
    ).html()


def profile_run(profile: Profile) -> Run:
    """The entry of a profile among the runs that are kept."""
    figures = {"mean step in seconds": profile.mean, "median step in seconds": profile.median}
    for name, seconds in profile.parts.over(profile.steps).seconds.items():
        if seconds:
            figures[f"{part_words(name, profile.device)} in a step, in seconds"] = seconds
    if profile.peak_memory is not None:
        figures["peak memory in bytes"] = profile.peak_memory
    return Run("profile", profile.name, profile.date, profile.device_name or profile.device, figures)


def profile_summary(profile: Profile) -> Group:
    """The short answer: where the time goes, which lines cost most, what to do."""
    lines: list[RenderableType] = [Text(printable(lead(profile)), style="bold"), Text(), _bars(profile), Text()]
    if profile.operations:
        lines += [_top(profile.operations[:5]), Text()]
    for advice in profile.advice:
        lines.append(Text(printable(advice.what), style="yellow"))
        lines.append(Padding(Text(f"fix: {printable(advice.fix)}"), (0, 0, 0, 2)))
    lines += [Text(printable(note), style="dim") for note in profile.notes]
    return Group(*lines)


def lead(profile: Profile) -> str:
    """The answer in a sentence."""
    part, share = max(profile.parts.shares.items(), key=lambda pair: pair[1])
    words = f"A step takes {duration(profile.mean)} on {profile.device}, the mean of {plural(profile.steps, 'step')}"
    return f"{words}; the largest part of it, {share:.0%}, is {part_words(part, profile.device)}."


def headlines(profile: Profile) -> list[Fact]:
    """The numbers that a person looks for first."""
    low, high = profile.spread
    part, share = max(profile.parts.shares.items(), key=lambda pair: pair[1])
    spread = f"{duration(low)} to {duration(high)}, median {duration(profile.median)}"
    facts = [
        Fact("a step, the mean", duration(profile.mean), spread),
        Fact("the largest part of it", f"{share:.0%}", part_words(part, profile.device)),
    ]
    if profile.ceiling and profile.rate:
        reached = f"{_flops(profile.rate)}/s of {_flops(profile.ceiling)}/s"
        facts.append(Fact("of what the device can compute", f"{profile.rate / profile.ceiling:.1%}", reached))
    skipped = f"after {plural(profile.skipped, 'step')} of warm-up"
    facts.append(Fact("steps profiled", count(profile.steps), skipped))
    facts.append(Fact("device", profile.device, profile.device_name or UNKNOWN))
    return facts


def shown_parts(profile: Profile) -> list[str]:
    """The parts that there can be here: a CPU has no copies to itself, and one process nobody to talk to."""
    seconds = profile.parts.seconds
    always = ("data", "gaps", "compute") if not has_kernels(profile.device) else (*PARTS[:4], "compute")
    return [name for name in PARTS if name in always or seconds[name] > 0]


def parts_table(profile: Profile) -> list[list[str]]:
    """The parts of a step: what, meaning, share, time in a step."""
    meaning = MEANING | (ON_HOST if not has_kernels(profile.device) else {})
    rows = []
    for name in shown_parts(profile):
        known = name != "data" or profile.data_known
        share = f"{profile.parts.shares[name]:.1%}" if known else UNKNOWN
        seconds = duration(profile.parts.seconds[name] / profile.steps) if known else UNKNOWN
        words = meaning[name] if known else "no DataLoader was seen: it is among the gaps"
        rows.append([part_words(name, profile.device), words, share, seconds])
    return [*rows, ["all", f"mean of {plural(profile.steps, 'step')}", "100%", duration(profile.mean)]]


def ceilings(profile: Profile) -> list[Fact]:
    """How far the computing is from what the device can do."""
    if not profile.flops:
        why = "no matmul or convolution was seen in the step that was looked at"
        return [Fact("operations of a step", UNKNOWN, why)]
    kinds = ", ".join(f"{_flops(n)} in {name}" for name, n in profile.flops.items())
    facts = [Fact("operations of a step", kinds, "of matmuls and convolutions, counted")]
    reached = {"reached over the whole step": profile.rate, "reached while it computes": profile.busy_rate}
    for words, rate in reached.items():
        share = f"{rate / profile.ceiling:.1%} of the ceiling" if rate and profile.ceiling else ""
        facts.append(Fact(words, UNKNOWN if rate is None else f"{_flops(rate)}/s", share))
    if profile.ceiling:
        measured = "large matmuls on this device, measured in this run"
        facts.append(Fact("ceiling", f"{_flops(profile.ceiling)}/s", measured))
    else:
        facts.append(Fact("ceiling", UNKNOWN, "not measured"))
    if profile.ceilings.get("bytes"):
        facts.append(Fact("memory's ceiling", f"{size(profile.ceilings['bytes'])}/s", "a large copy, read and written"))
    return facts


def _operations(profile: Profile) -> Table:
    rows = []
    for operation in profile.operations:
        figures = [duration(operation.seconds), f"{operation.share:.1%}", f"{operation.calls:.3g}"]
        rows.append([_where(operation.line), _named(operation), operation.shapes, *figures])
    header = ["your line", "operation", "shapes", "in a step", "share", "calls"]
    said = "A backward operation stands at the line of its forward, an update at that of optimizer.step()."
    return Table("The costliest operations", header, rows, said, words=(0, 1, 2))


def _named(operation: OperationCost) -> str:
    """An operation and its phase, which is not said twice: convolution_backward is the convolution, backward."""
    name = operation.name.removesuffix("_backward") if operation.phase == "backward" else operation.name
    return f"{name}, {operation.phase}" if operation.phase else name


def _where(line: Line | None) -> str:
    """A line and the beginning of what it says, which must not make a table too wide to read."""
    return UNKNOWN if line is None else f"{line}: {clipped(line.code, CODE)}" if line.code else str(line)


def _waits(profile: Profile) -> Table:
    rows = [[_where(wait.line), wait.what, duration(wait.seconds), f"{wait.calls:.3g}"] for wait in profile.waits]
    said = "Nothing: no line reads a value from a tensor, and none asks the host to wait."
    if rows:
        on_gpu = "On a CPU these lines cost next to nothing. On a GPU the host waits there until the device catches up."
        said = "" if has_kernels(profile.device) else on_gpu
    header = ["your line", "what", "in a step", "times in a step"]
    return Table("What the host waited for", header, rows, said, words=(0, 1))


def _memory(profile: Profile) -> list[Block]:
    if not profile.memory:
        return [Words("Memory over a step", ["Unknown: the run ended before a step could be looked at."])]
    caption = "The step was looked at operation by operation, so it took longer than a plain one."
    if left_out := always_there(profile):
        caption += f" Left out: {size(left_out)} of other memory that was there all the time, such as data."
    return [
        Drawing("Memory over a step", memory_drawing(profile) + line(caption, faint=True)),
        Facts("At the highest moment", memory_facts(profile)),
    ]


def memory_drawing(profile: Profile) -> str:
    """What was alive over the step, one category upon another, and below it the phases; those that flicker are not."""
    moments = [sample.seconds for sample in profile.memory]
    bands = {name: [float(getattr(sample, name)) for sample in profile.memory] for name in CATEGORIES}
    bands["other"] = [amount - always_there(profile) for amount in bands["other"]]
    peak = max(map(sum, zip(*bands.values(), strict=True)))
    unit = next((unit for unit in (2**30, 2**20, 2**10) if peak >= unit), 1)
    stops: list[tuple[float, str]] = []
    before = ""
    for sample in profile.memory:
        if sample.phase != before and (not stops or sample.seconds - stops[-1][0] > 0.1 * moments[-1]):
            stops.append((sample.seconds, sample.phase))
        before = sample.phase
    scaled = {name: [amount / unit for amount in amounts] for name, amounts in bands.items()}
    return stacked(f"alive, in {size(unit).split()[1]}", moments, scaled, stops)


def always_there(profile: Profile) -> int:
    """Bytes of no known purpose that lived through the whole step, if they would press all else flat; else 0."""
    least = min(sample.other for sample in profile.memory)
    return least if least > 0.5 * max(sample.total for sample in profile.memory) else 0


def memory_facts(profile: Profile) -> list[Fact]:
    """What was alive at the highest moment of the step that was looked at."""
    top = max(profile.memory, key=lambda sample: sample.total)
    facts = [Fact("highest", size(top.total), f"in {top.phase}")]
    held = {"parameters": top.parameters, "gradients": top.gradients, "optimizer's state": top.optimizer}
    facts += [Fact(name, size(bytes_)) for name, bytes_ in held.items()]
    facts.append(Fact("activations", size(top.activations), "what the forward pass made and still keeps"))
    facts.append(Fact("other", size(top.other), "batches, data in memory, what operations need for a moment"))
    if profile.peak_memory is not None:
        facts.append(Fact("peak by the allocator", size(profile.peak_memory), "while the steps were recorded"))
    return facts


def method(profile: Profile) -> list[str]:
    """How it was measured, and what the measuring cost."""
    words = [
        f"{plural(profile.steps, 'step')} recorded with PyTorch's profiler after {plural(profile.skipped, 'step')} of "
        "warm-up, without stacks and shapes, which would slow the host down.",
        "Lines, shapes and memory come from one step beside them, looked at operation by operation.",
        "The file trace.json.gz beside this page holds every event: open it in Perfetto or in Chrome's tracing page.",
    ]
    if profile.plain:
        words.insert(1, f"Just before, a step without the profiler took {duration(profile.plain)}.")
    return words


def _bars(profile: Profile) -> Grid:
    """The parts and their sum; where it is narrow, the bars give way and the numbers stay."""
    table = Grid.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(max_width=BAR)
    table.add_column(justify="right", no_wrap=True, style="bold")
    table.add_column(justify="right", no_wrap=True, style="dim")
    shares = profile.parts.shares
    *parts, (every, _, whole, mean) = parts_table(profile)
    for name, (words, _, share, seconds) in zip(shown_parts(profile), parts, strict=True):
        table.add_row(words, Bar(1.0, 0, shares[name], color="cyan"), share, seconds)
    table.add_row(every, "", whole, mean)
    return table


def _top(operations: Sequence[OperationCost]) -> Grid:
    """Where it is narrow, names and lines are cut short and the numbers stay."""
    rows = []
    for operation in operations:
        where = "unknown" if operation.line is None else f"{_tail(operation.line)}  {operation.line.code}"
        rows.append([f"{operation.share:.1%}", duration(operation.seconds), clipped(_named(operation), NAME), where])
    return Table("", ["share", "time", "operation", "your line"], rows, words=(2, 3)).in_terminal(cuts=(2, 3))


def _tail(line: Line) -> str:
    """A line by its file, of whose long path the end is shown.

    >>> _tail(Line("a/long/way/down/to/the/network.py", 7))
    '…ay/down/to/the/network.py:7'
    """
    words = str(line)
    return words if len(words) <= PATH else f"…{words[1 - PATH :]}"


def _flops(n: float) -> str:
    """Floating-point operations in a unit that suits them.

    >>> _flops(5.18e9)
    '5.18 GFLOP'
    """
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if n >= factor:
            return f"{n / factor:.3g} {unit}FLOP"
    return f"{n:.3g} FLOP"
