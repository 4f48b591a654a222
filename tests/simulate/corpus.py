"""The corpus: training scripts as people write them, each with what a simulation of it must say.

A script says it in the comments at its top, and marks the lines that it means (`# <- loss`):

    # why: the target stays on the CPU, which nll_loss refuses.    (broken and slow scripts)
    # twin: digits_argparse.py                                     (the healthy script that it differs from)
    # style: argparse, a main guard                                (healthy scripts)
    # runs: cuda                                                   (without this line: on the CPU too)
    # steps: 6                                                     (of several optimizers: full rounds)
    # updates: 12                                                  (calls of step, where optimizers take turns)
    # expect: nothing                                              (no error and no warning)
    # expect: mixed-devices error at loss, fix target.to(          (any code of `MIXES`; the fix has these words)
    # expect: maybe mixed-devices error or warning at loss or accuracy
    # expect: sync item or bool at loss, times 6                   (at least so often)
    # expect: no sync at loss
    # expect: copy to the device at batch, pinned, non-blocking    (or pageable, blocking)
    # expect: note compile                                         (a word of a note)
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
KINDS = ("healthy", "broken", "slow")
ERROR, WARNING, INFO = "error", "warning", "info"
TRAITS = {"pinned": ("pinned", True), "pageable": ("pinned", False), "blocking": ("blocking", True)}
TRAITS["non-blocking"] = ("blocking", False)
# A mix of devices may be told by its cause; a script that expects `mixed-devices` leaves open by which.
MIXES = ("mixed-devices", "model-on-cpu", "left-on-cpu", "made-on-cpu", "state-on-cpu")

_WORDS = r"[\w -]+?"
_LEVELS = r"(?:error|warning|info)(?: or (?:error|warning|info))*"
_FINDING = re.compile(rf"(?P<names>{_WORDS}) (?P<levels>{_LEVELS})")
_SYNC = re.compile(rf"sync(?: (?P<names>{_WORDS}))?")
_COPY = re.compile(r"copy (?P<names>to the device|to the host)")
_MARK = re.compile(r"# <- (\w+)$")
_HEADER = re.compile(r"# (why|twin|style|runs|steps|updates|expect): (.+)")


@dataclass(frozen=True)
class Expectation:
    """One thing that a simulation must say, may say (`maybe`) or must not say (`no`)."""

    said: str  # as it is written in the script
    part: str  # of the result: findings, copies, syncs or notes
    names: tuple[str, ...] = ()  # codes, kinds, a direction or a word; any of them will do, none means any
    lines: frozenset[int] = frozenset()  # any of them
    levels: tuple[str, ...] = ()
    demand: str = "must"  # must, maybe, no
    times: int = 1
    traits: dict[str, bool] = field(default_factory=dict)  # of a copy
    fix: str = ""  # words of a finding's fix

    def met_by(self, entry: dict[str, Any]) -> bool:
        """Whether one entry of the result is what is meant; how often it happened is not looked at."""
        name = entry[{"findings": "code", "copies": "direction", "syncs": "kind"}[self.part]]
        return (
            entry["line"] in self.lines
            and (not self.names or name in self.names)
            and (not self.levels or entry["level"] in self.levels)
            and all(entry[trait] == value for trait, value in self.traits.items())
            and self.fix in entry.get("fix", "")
        )


@dataclass(frozen=True)
class Script:
    """A script of the corpus."""

    path: Path
    kind: str  # healthy, broken, slow
    expectations: tuple[Expectation, ...]
    steps: int
    updates: int
    runs: str = "cpu"
    about: str = ""  # why it is broken or slow, or its style
    twin: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.path.stem}"


def scripts() -> list[Script]:
    """All scripts of the corpus."""
    return [load(path) for kind in KINDS for path in sorted((SCRIPTS / kind).glob("*.py"))]


def load(path: Path) -> Script:
    """Read a script with what it expects; `ValueError` names the line that makes no sense."""
    try:
        return parse(path.read_text(encoding="utf-8"), path)
    except ValueError as error:
        raise ValueError(f"{path.parent.name}/{path.name}: {error}") from error


def parse(text: str, path: Path) -> Script:
    """Take what a script expects from its text."""
    entries = list(_header(text))
    facts = dict(entries)
    marks = _marks(text)
    said = [value for key, value in entries if key == "expect"]
    expectations = tuple(expectation(value, marks) for value in said if value != "nothing")
    if not said:
        raise ValueError("it expects something, if only `nothing`")
    if "nothing" in said and any(each.part == "findings" for each in expectations):
        raise ValueError("it expects findings and `nothing`")
    if unused := {line for lines in marks.values() for line in lines} - {n for e in expectations for n in e.lines}:
        raise ValueError(f"no expectation is about the marks at lines {sorted(unused)}")
    return Script(
        path=path,
        kind=path.parent.name,
        expectations=expectations,
        steps=int(facts.get("steps", 0)),
        updates=int(facts.get("updates", facts.get("steps", 0))),
        runs=facts.get("runs", "cpu"),
        about=facts.get("why", facts.get("style", "")),
        twin=path.parent.parent / "healthy" / facts["twin"] if "twin" in facts else None,
    )


def expectation(said: str, marks: dict[str, frozenset[int]]) -> Expectation:
    """Understand what follows `# expect:`; the marks tell the lines."""
    if said.startswith("note "):
        return Expectation(said, "notes", (said.removeprefix("note "),))
    head, *extras = said.split(", ")
    demand = next((word for word in ("maybe", "no") if head.startswith(word + " ")), "must")
    what, at, where = head.removeprefix(demand + " ").partition(" at ")
    if not at:
        raise ValueError(f"`{said}` does not say at which mark")
    places = where.split(" or ")
    if missing := [place for place in places if place not in marks]:
        raise ValueError(f"`{said}` means a mark that is not there: {', '.join(missing)}")
    lines = frozenset(line for place in places for line in marks[place])
    for part, pattern in (("syncs", _SYNC), ("copies", _COPY), ("findings", _FINDING)):
        if found := pattern.fullmatch(what):
            plain = Expectation(said, part, _names(found), lines, _levels(found), demand)
            return replace(plain, **_extras(said, part, extras))
    raise ValueError(f"`{said}` is neither a finding, a sync, a copy nor a note")


def _names(found: re.Match[str]) -> tuple[str, ...]:
    names = found["names"].split(" or ") if found["names"] else []
    return (*names, *MIXES) if MIXES[0] in names else tuple(names)


def _levels(found: re.Match[str]) -> tuple[str, ...]:
    return tuple(found["levels"].split(" or ")) if "levels" in found.groupdict() else ()


def _extras(said: str, part: str, extras: list[str]) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for extra in extras:
        word, _, value = extra.partition(" ")
        if word == "times" and re.fullmatch("[1-9][0-9]*", value):
            known["times"] = int(value)
        elif word == "fix" and value and part == "findings":
            known["fix"] = value
        elif extra in TRAITS and part == "copies":
            known["traits"] = {**known.get("traits", {}), **dict([TRAITS[extra]])}
        else:
            raise ValueError(f"`{said}` has an unknown ending: {extra}")
    return known


def _header(text: str) -> Iterator[tuple[str, str]]:
    for line in re.sub(r"\n# {3,}", " ", text).splitlines():  # a long reason goes on in the next line
        if not line.startswith("#"):
            return
        if found := _HEADER.fullmatch(line):
            yield found[1], found[2]


def _marks(text: str) -> dict[str, frozenset[int]]:
    marks: dict[str, set[int]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if found := _MARK.search(line):
            marks.setdefault(found[1], set()).add(number)
    return {name: frozenset(lines) for name, lines in marks.items()}


def complaints(script: Script, result: dict[str, Any]) -> list[str]:
    """What is wrong with the result of a simulation, in words; nothing if it is right.

    Where a sync or a copy is expected, a warning of it may be among the findings too. Findings of level info are free.
    """
    wrong = [_unmet(each, result) for each in script.expectations]
    wrong += [_unexpected(script, finding) for finding in result["findings"]]
    if result["completed"] != script.steps:
        wrong.append(f"{result['completed']} steps were completed and not {script.steps}")
    return [words for words in wrong if words]


def _unmet(wanted: Expectation, result: dict[str, Any]) -> str:
    if wanted.part == "notes":
        return "" if any(wanted.names[0] in note for note in result["notes"]) else f"missing: {wanted.said}"
    times = sum(entry["count"] for entry in result[wanted.part] if wanted.met_by(entry))
    if wanted.demand == "no":
        return f"{wanted.said}, but it is there {times} times" if times else ""
    if wanted.demand == "must" and times < wanted.times:
        return f"missing: {wanted.said} (line {sorted(wanted.lines)}, seen {times} times)"
    return ""


def _unexpected(script: Script, finding: dict[str, Any]) -> str:
    if finding["level"] == INFO:
        return ""
    where = f"{finding['file']}:{finding['line']}"
    for wanted in script.expectations:
        if finding["file"] != script.path.name or wanted.demand == "no" or wanted.part == "notes":
            continue
        if wanted.part == "findings" and wanted.met_by(finding):
            return ""
        if wanted.part != "findings" and finding["level"] == WARNING and finding["line"] in wanted.lines:
            return ""
    return f"not expected: {finding['code']} ({finding['level']}) at {where}: {finding['message']}"
