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
from hotloop.report.document import Block, Document, Drawing, Facts, Table, Words
from hotloop.report.runs import Run
from hotloop.report.words import UNKNOWN, Fact, when

MEANING = {
    "data": "the next batch was not ready",
    "copies": "between host and device, while nothing was computed",
    "waits": "the device had nothing to do, and the host was in a call that waits for it",
    "gaps": "the device had nothing to do, because the host had not prepared it yet",
    "communication": "with other processes, while nothing was computed",
    "compute": "the device worked",
}
ON_HOST = {"gaps": "interpreting, calling, everything that is no operation of PyTorch", "compute": "operations ran"}
OPERATIONS = ["your line", "operation", "shapes", "in a step", "share", "calls"]
WAITS = ["your line", "what", "in a step", "times in a step"]
SAID_OF_LINES = "A backward operation stands at the line of its forward, an update at that of optimizer.step()."
CODE = 36  # characters of a line of code in a table
BAR, PATH = 30, 32  # characters of the longest bar and of the longest path in the terminal


def profile_page(profile: Profile, *, command: str | None = None) -> str:
    """The whole page, in the order of the questions: where the time goes, how far from the limits, which lines."""
    waits = [[_where(wait.line), wait.what, duration(wait.seconds), f"{wait.calls:.3g}"] for wait in profile.waits]
    shares = profile.parts.shares
    drawn = [(part_words(name, profile.device), shares[name], f"{shares[name]:.1%}") for name in shown_parts(profile)]
    blocks: list[Block] = [
        Drawing("Where a step's time went", bars(drawn)),
        Table("In figures", ["part", "what it is", "share", "in a step"], parts_table(profile), words=(0, 1)),
        *(
            [Words("What to do about it", [f"{a.what} Fix: {a.fix}." for a in profile.advice])]
            if profile.advice
            else []
        ),
        Facts("How far the computing is from the device's ceilings", ceilings(profile)),
        Table("The costliest operations", OPERATIONS, _operations(profile), SAID_OF_LINES, words=(0, 1, 2)),
        Table("What the host waited for", WAITS, waits, _said_of_waits(profile), words=(0, 1)),
        *_memory(profile),
    ]
    blocks.append(Words("How it was measured", [*profile.notes, *method(profile)]))
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
    facts = [
        Fact(
            "a step, the mean",
            duration(profile.mean),
            f"{duration(low)} to {duration(high)}, median {duration(profile.median)}",
        ),
        Fact("the largest part of it", f"{share:.0%}", part_words(part, profile.device)),
    ]
    if profile.ceiling and profile.rate:
        reached = f"{_flops(profile.rate)} of {_flops(profile.ceiling)}"
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
        return [
            Fact("operations of a step", UNKNOWN, "no matmul or convolution was seen in the step that was looked at")
        ]
    kinds = ", ".join(f"{_count_of(n)} in {name}" for name, n in profile.flops.items())
    facts = [Fact("operations of a step", kinds, "of matmuls and convolutions, counted")]
    for words, rate in (
        ("reached over the whole step", profile.rate),
        ("reached while it computes", profile.busy_rate),
    ):
        share = f"{rate / profile.ceiling:.1%} of the ceiling" if rate and profile.ceiling else ""
        facts.append(Fact(words, UNKNOWN if rate is None else _flops(rate), share))
    measured = "large matmuls on this device, measured in this run"
    facts.append(
        Fact(
            "ceiling",
            _flops(profile.ceiling) if profile.ceiling else UNKNOWN,
            measured if profile.ceiling else "not measured",
        )
    )
    if profile.ceilings.get("bytes"):
        facts.append(Fact("memory's ceiling", f"{size(profile.ceilings['bytes'])}/s", "a large copy, read and written"))
    return facts


def _operations(profile: Profile) -> list[list[str]]:
    rows = []
    for operation in profile.operations:
        figures = [duration(operation.seconds), f"{operation.share:.1%}", f"{operation.calls:.3g}"]
        rows.append([_where(operation.line), _named(operation), operation.shapes, *figures])
    return rows


def _named(operation: OperationCost) -> str:
    """An operation and its phase, which is not said twice: convolution_backward is the convolution, backward."""
    name = operation.name.removesuffix("_backward") if operation.phase == "backward" else operation.name
    return f"{name}, {operation.phase}" if operation.phase else name


def _where(line: Line | None) -> str:
    """A line and the beginning of what it says, which must not make a table too wide to read."""
    return UNKNOWN if line is None else f"{line}: {clipped(line.code, CODE)}" if line.code else str(line)


def _said_of_waits(profile: Profile) -> str:
    if not profile.waits:
        return "Nothing: no line reads a value from a tensor, and none asks the host to wait."
    if has_kernels(profile.device):
        return ""
    return (
        "On a CPU these lines cost next to nothing. On a GPU each makes the host wait until the device has caught up."
    )


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
    longest = max(shares.values()) or 1.0
    *parts, (every, _, whole, mean) = parts_table(profile)
    for name, (words, _, share, seconds) in zip(shown_parts(profile), parts, strict=True):
        table.add_row(words, Bar(longest, 0, shares[name], color="cyan"), share, seconds)
    table.add_row(every, "", whole, mean)
    return table


def _top(operations: Sequence[OperationCost]) -> Grid:
    """Where it is narrow, names and lines are cut short and the numbers stay: what must not wrap gives way last."""
    table = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("operation", max_width=34)
    table.add_column("your line")
    for operation in operations:
        line = operation.line
        where = Text.assemble(_tail(line), (f"  {printable(line.code)}", "dim")) if line else Text("unknown")
        name = Text(printable(_named(operation)))
        for cell in (name, where):
            cell.no_wrap, cell.overflow = True, "ellipsis"
        table.add_row(f"{operation.share:.1%}", duration(operation.seconds), name, where)
    return table


def _tail(line: Line) -> str:
    """A line by its file, of whose long path the end is shown.

    >>> _tail(Line("a/long/way/down/to/the/network.py", 7))
    '…ng/way/down/to/the/network.py:7'
    """
    words = printable(str(line))
    return words if len(words) <= PATH else f"…{words[1 - PATH :]}"


def _flops(rate: float) -> str:
    return f"{_count_of(rate)}/s"


def _count_of(n: float) -> str:
    """Floating-point operations in a unit that suits them.

    >>> _count_of(5.18e9)
    '5.18 GFLOP'
    """
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if n >= factor:
            return f"{n / factor:.3g} {unit}FLOP"
    return f"{n:.3g} FLOP"
