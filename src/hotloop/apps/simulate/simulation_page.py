"""A `Simulation` as a page: does it fit, what takes the memory, what is wrong, where it copies and waits.

Read from the plain data of `Simulation.to_json()`, since reports and the simulated GPU do not know each other.
"""

from collections.abc import Collection, Sequence

from hotloop.apps.simulate.simulation_plots import Data, far_above, peak_line, steps_plot
from hotloop.printing.text import clipped, count, duration, plural, printable, size
from hotloop.report.document import Block, Document, Facts, Plot, Table, Words
from hotloop.report.memory_page import OUTSIDE
from hotloop.report.plots import DARK, LIGHT
from hotloop.report.runs import Run
from hotloop.report.words import DASH, UNKNOWN, Fact, when

MEANING = {
    "parameters": "the weights",
    "buffers": "what a model keeps beside its weights, such as running means",
    "gradients": "one for each weight that learns",
    "optimizer": "its state, such as Adam's two moments",
    "activations": "what the forward pass made and the backward pass still needs",
    "inputs": "what was copied to the device: batches",
    "temporaries": "results that are soon gone, such as gradients of activations",
    "workspaces": "what cuBLAS and cuDNN take for themselves",
    "context": "the driver's own and the code of kernels; tensors cannot have it",
}
LEVELS = {"error": ("error", "errors"), "warning": ("warning", "warnings"), "info": ("hint", "hints")}
LINES_SHOWN = 15  # lines of a table; report.json has all
LIMITS = {
    "device": "The GPU limits the pace.",
    "launches": "The host limits the pace: launching the operations takes longer than computing them.",
    "copies": "Copies between host and device limit the pace.",
    "data": "The data limits the pace: the GPU waits for batches.",
    "work": "The script's own work on the host limits the pace: the GPU waits for it.",
}
NO_VERDICT = {
    "failed": "failed",
    "not-simulated": "could not be simulated",
    "no-steps": "did not train",
    "no-gpu": "never uses the GPU",
    "cut-short": "did not come far enough",
}
UNTIL_THEN = "This is what was seen until then."
METHOD = (
    "Nothing ran on a GPU: the script ran here, on tensors that have shapes but no values.",
    "Memory comes from a model of PyTorch's allocator, which heard of every tensor that came and went.",
    "Workspaces, the context and all times come from tables of constants. They are as near as the GPU that they were "
    "fitted on is to yours: where it was not measured, it says uncalibrated.",
    "What an operation costs the host is the same for every GPU. Data and the script's own work were measured here.",
)


def simulation_page(
    data: Data, *, script: str, command: str | None = None, versions: dict[str, str] | None = None, date: str = ""
) -> str:
    """The whole page, in the order of the questions."""
    notes = [printable(note) for note in data.get("notes") or ()]
    return Document(
        f"{clipped(script, 40)} on {gpu_of(data)}, simulated",
        [
            *_memory(data),
            *_room(data),
            _findings(data),
            *_crossings(data),
            *([Words("Notes", notes)] if notes else []),
            Words("How it was found", METHOD),
        ],
        headlines(data),
        lead(data, script),
        _warning(data),
        None if command is None else printable(command),
        versions,
        when(date),
        "predicted by a model",
    ).html()


def simulation_run(data: Data, *, script: str, date: str) -> Run:
    """The entry of a simulation among the runs that are kept; named so that a measured one can be put beside it."""
    peak, step = data.get("peak") or {}, data.get("step_ms")
    figures: dict[str, float | None] = {
        "median step in seconds": step["median"] / 1e3 if step else None,
        "memory of the process in bytes": peak.get("process"),
        "peak memory in bytes": peak.get("allocated"),
        "largest batch": data.get("largest_batch"),
        "findings": len(data.get("findings") or ()),
    }
    known = {name: float(value) for name, value in figures.items() if value is not None}
    return Run("simulate", script, date, f"{gpu_of(data)}, simulated", known)


def gpu_of(data: Data) -> str:
    """The GPU that was simulated."""
    several = f"{data['gpus']} × " if data.get("gpus", 1) > 1 else ""
    return several + printable(data.get("gpu_name") or data["gpu"])


def lead(data: Data, script: str) -> str:
    """The answer in a few sentences."""
    sentences = [_verdict(data, printable(script))]
    if step := data.get("step_ms"):
        sure = "" if step["calibrated"] else "; this GPU was not measured, so that is a rule of thumb"
        low, high = _ms(step["low"]), _ms(step["high"])
        sentences.append(f"A step would take {_ms(step['median'])}, most likely between {low} and {high}{sure}.")
    if pace := data.get("pace"):
        if pace["data_ms"] + pace["work_ms"]:
            sentences.append(f"Batches and the script's own work on the host, measured here, make that {_pace(pace)}.")
        sentences.append(LIMITS[pace["limited_by"]])
    if data.get("largest_batch") is not None:
        sentences.append(f"The largest batch that fits is {count(data['largest_batch'])}.")
    sentences.append(_found(data))
    return " ".join(sentences)


def headlines(data: Data) -> list[Fact]:
    """The numbers that a person looks for first."""
    peak, step, facts = data.get("peak"), data.get("step_ms"), []
    if peak:
        of = f" of {size(data['gpu_memory'])}" if data.get("gpu_memory") else ""
        fits = {True: "yes", False: "no", None: "too close to say"}[data.get("fits")]
        facts.append(Fact("does it fit?", fits, f"{size(peak['process'])}{of} at the peak{_between(data)}"))
        facts.append(Fact("allocated at the peak", size(peak["allocated"]), f"{size(peak['reserved'])} reserved"))
    if step:
        sure = "" if step["calibrated"] else ", uncalibrated"
        facts.append(Fact("a step", _ms(step["median"]), f"{_ms(step['low'])} to {_ms(step['high'])}{sure}"))
    pace = data.get("pace")
    if pace and pace["data_ms"] + pace["work_ms"]:
        by = f" by {plural(pace['workers'], 'worker')}" if pace["workers"] else ""
        parts = [f"data {_ms(pace['data_ms'])}{by}"] * bool(pace["data_ms"])
        parts += [f"other host work {_ms(pace['work_ms'])}"] * bool(pace["work_ms"])
        facts.append(
            Fact("with data and host work", _ms(pace["step_ms"]["median"]), f"{', '.join(parts)}, measured here")
        )
    if data.get("largest_batch") is not None:
        facts.append(Fact("largest batch", count(data["largest_batch"]), f"on {gpu_of(data)}"))
    facts.append(Fact("findings", count(len(data.get("findings") or ())), _levels(data)))
    facts.append(Fact("steps simulated", count(data["completed"]), f"of {data['steps']} asked for"))
    return facts


def categories_table(data: Data) -> list[list[str]]:
    """What the peak is made of: name, meaning, bytes, share; together what the driver would show."""
    peak, held = data["peak"], data.get("categories") or {}
    process = peak["process"]
    rows = [[printable(name), MEANING.get(name, ""), held[name]] for name in sorted(held, key=lambda name: -held[name])]
    if (rest := process - sum(held.values())) > 0:
        rows.append(["held in reserve", "by PyTorch's allocator: segments that are cached, and gaps in them", rest])
    rows.append(["the process", "what the driver would show", process])
    return [[name, meaning, size(amount), _share(amount, process)] for name, meaning, amount in rows]


def modules_table(data: Data) -> list[list[str]]:
    """Modules by what they keep in activations: name, how many, bytes, share. Layers of one kind are counted together.

    >>> modules_table({"modules": {"blocks.0.mlp": 3 << 20, "blocks.1.mlp": 3 << 20, "head": 2 << 20}})
    [['blocks.*.mlp', '2', '6.0 MiB', '75.0%'], ['head', '1', '2.0 MiB', '25.0%']]
    """
    modules: dict[str, int] = data.get("modules") or {}
    parents = {name.rpartition(".")[0] for name in modules}
    alike: dict[str, list[str]] = {}
    for name in modules:
        alike.setdefault(_kind(name, parents), []).append(name)
    sums = [(sum(modules[name] for name in names), kind, names) for kind, names in alike.items()]
    sums.sort(key=lambda entry: -entry[0])
    whole = sum(modules.values())
    rows = []
    for amount, kind, names in sums[:LINES_SHOWN]:
        shown = kind if len(names) > 1 else names[0]
        rows.append([printable(shown) or OUTSIDE, str(len(names)), size(amount), _share(amount, whole)])
    if rest := sums[LINES_SHOWN:]:
        amount, number = sum(amount for amount, _, _ in rest), sum(len(names) for _, _, names in rest)
        rows.append(["all others", str(number), size(amount), _share(amount, whole)])
    return rows


def _kind(name: str, parents: Collection[str]) -> str:
    """A module's path with a star for the number of a layer; the last number is one only where modules lie below it.

    >>> _kind("blocks.3.mlp.0", {"blocks.3.mlp", "blocks.3"}), _kind("blocks.3", {"blocks.3"}), _kind("0", set())
    ('blocks.*.mlp.0', 'blocks.*', '0')
    """
    *above, last = name.split(".")
    parts = ["*" if part.isdigit() else part for part in above]
    return ".".join([*parts, "*" if last.isdigit() and name in parents else last])


def _memory(data: Data) -> list[Block]:
    if not data.get("peak"):
        return []
    blocks: list[Block] = []
    if data.get("timeline"):
        light, dark, thin_light, thin_dark = (
            steps_plot(data, "svg", theme, narrow) for narrow in (False, True) for theme in (LIGHT, DARK)
        )
        alt = "Allocated memory over the steps, one category upon another, below what the process holds"
        blocks.append(Plot("Memory over the steps", alt, light, dark, thin_light, thin_dark, _caption(data)))
    header = ["what", "", "at the peak", "share"]
    blocks.append(Table("What the peak is made of", header, categories_table(data), words=(0, 1)))
    if rows := modules_table(data):
        header = ["module", "how many", "at the peak", "share"]
        said = "Activations alone, in the module that made them. * stands for the number of a layer."
        blocks.append(Table("Activations by module", header, rows, said))
    return blocks


def _room(data: Data) -> list[Block]:
    """Changes that were simulated beside the script as it is, which comes first."""
    rows = []
    for each in data.get("helps") or ():
        batch = DASH if each.get("batch") is None else count(each["batch"])
        step = DASH if each.get("step_ms") is None else _ms(each["step_ms"])
        taken = size(each["peak"])
        if each["peak"] is None and each.get("needs") is not None:
            taken = f"{size(each['needs'])}, does not fit"
        rows.append([printable(each["change"]), taken, batch, step])
    header = ["change", "memory of the process", "largest batch", "a step"]
    return [Table("What would make room", header, rows, "Each was simulated.")] if len(rows) > 1 else []


def _caption(data: Data) -> str:
    words = []
    if where := peak_line(data, 200):
        words.append(f"The peak is {where}.")
    words.append(
        "What the process holds is the context and what PyTorch has reserved; it gives nothing back of its own accord."
    )
    if far_above(data):
        words.append(f"The {size(data['gpu_memory'])} of the card lie far above the picture.")
    return " ".join(words)


def _findings(data: Data) -> Block:
    found = data.get("findings") or ()
    error = data.get("error") or ""
    told = any(finding["code"] == data.get("status") or finding["message"] in error for finding in found)
    facts = [Fact("what ended it", _last_line(error))] if error and not told else []
    if not found and not facts:
        return Words("What would go wrong", ["No device bug was found in the lines that ran."])
    for finding in sorted(found, key=_rank):
        sure = ", perhaps" if finding["confidence"] == "suspected" else ""
        times = f", {count(finding['count'])} times" if finding["count"] > 1 else ""
        first, *more = [printable(line.strip()) for line in finding["message"].splitlines()] or [UNKNOWN]
        level = LEVELS.get(finding["level"], ("finding",))[0]
        facts.append(Fact(f"{level}{sure}{times}", f"{_where(finding)}: {first}", "; ".join(more)))
        if finding["fix"]:
            facts.append(Fact("fix", printable(finding["fix"])))
    return Facts("What would go wrong", facts)


def _crossings(data: Data) -> list[Block]:
    copies = sorted(data.get("copies") or (), key=lambda copy: -copy["bytes"])
    waits = sorted(data.get("syncs") or (), key=lambda wait: -wait["count"])
    copied = [[_where(copy), _how(copy), size(copy["bytes"]), count(copy["count"])] for copy in copies[:LINES_SHOWN]]
    waited = [[_where(wait), printable(wait["kind"]), count(wait["count"])] for wait in waits[:LINES_SHOWN]]
    ran = "In all that ran, what came before the first step included."
    blocks: list[Block] = []
    if copied:
        header = ["your line", "what", "bytes", "copies"]
        blocks.append(Table("Copies", header, copied, f"{ran}{_left_out(copies)}", (0, 1)))
    if waited:
        header = ["your line", "what", "times"]
        blocks.append(Table("Where the host waits for the device", header, waited, f"{ran}{_left_out(waits)}", (0, 1)))
    return blocks


def _how(copy: Data) -> str:
    memory = "pinned" if copy["pinned"] else "pageable"
    waits = copy["blocking"] or not copy["pinned"]  # of pageable memory, whatever was asked for
    return f"{printable(copy['direction'])}, {memory}; the host {'waits' if waits else 'goes on'}"


def _left_out(rows: Sequence[object]) -> str:
    return f" {plural(len(rows) - LINES_SHOWN, 'more line')} in report.json." if len(rows) > LINES_SHOWN else ""


def _verdict(data: Data, script: str) -> str:
    peak, gpu, memory = data.get("peak"), gpu_of(data), data.get("gpu_memory")
    if why := NO_VERDICT.get(data.get("status", "")):
        return f"There is no verdict: {script} {why} on a simulated {gpu}, so its memory and its speed are not known."
    if not peak:
        return f"{script} was run on a simulated {gpu}."
    taken = f"{size(peak['process'])}{f' of its {size(memory)}' if memory else ''}{_between(data)}"
    if data.get("fits"):
        return f"{script} fits on {gpu}: at its peak the process would take {taken}."
    if data.get("fits") is None:
        return f"Whether {script} fits on {gpu} is too close to say: at its peak the process would take {taken}."
    if memory and peak["process"] > memory:
        return (
            f"{script} does not fit on {gpu}: the process would need {size(peak['process'])}, where {size(memory)} are."
        )
    return f"{script} does not fit on {gpu}: memory runs out when the process holds {taken}."


def _between(data: Data) -> str:
    """Where nine of ten such peaks lie."""
    interval = data.get("interval")
    if not interval:
        return ""
    return f", between {size(interval['low']['process'])} and {size(interval['high']['process'])}"


def _found(data: Data) -> str:
    if not data.get("findings"):
        return "No device bug was found."
    ends = any(finding["level"] == "error" for finding in data["findings"]) and data.get("status") not in NO_VERDICT
    return f"Found: {_levels(data)}.{' On the GPU, the script would end at the first error.' if ends else ''}"


def _levels(data: Data) -> str:
    levels = [finding["level"] for finding in data.get("findings") or ()]
    return ", ".join(plural(levels.count(level), *LEVELS[level]) for level in LEVELS if level in levels) or "none"


def _last_line(error: str) -> str:
    """What an error says, without the frames that led to it."""
    return printable(next((line.strip() for line in reversed(error.splitlines()) if line.strip()), UNKNOWN))


def _rank(finding: Data) -> int:
    return [*LEVELS, finding["level"]].index(finding["level"])


def _warning(data: Data) -> tuple[str, str] | None:
    made = f"{data['completed']} of {plural(data['steps'], 'step')}"
    if data.get("error") or data.get("status") == "failed":
        return f"The script ended with an error after {made}.", UNTIL_THEN
    return (f"Only {made} ran.", UNTIL_THEN) if data["completed"] < data["steps"] else None


def _where(entry: Data) -> str:
    return f"{printable(entry['file'])}:{entry['line']}" if entry["line"] else UNKNOWN


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else ""


def _pace(pace: Data) -> str:
    step = pace["step_ms"]
    return f"{_ms(step['median'])} ({_ms(step['low'])} to {_ms(step['high'])})"


def _ms(milliseconds: float) -> str:
    return duration(milliseconds / 1e3)
