"""The corpus: training scripts as people write them, each with what a simulation of it must say.

A script says it in the comments at its top, and marks the lines that it means (`# <- loss`):

    # why: the target stays on the CPU, which nll_loss refuses.    (broken and slow scripts)
    # twin: digits_argparse.py                                     (the healthy script that it is made from)
    # style: argparse, a main guard                                (healthy scripts)
    # runs: cuda                                                   (without this line: on the CPU too)
    # steps: 6                                                     (of several optimizers: full rounds)
    # updates: 12                                                  (calls of step, where optimizers take turns)
    # expect: nothing                                              (no finding)
    # expect: mixed-devices error at loss, fix target.to(          (the fix has these words, without a comma)
    # expect: sync item or bool at loss, times 6                   (at least so often)
    # expect: no sync at loss
    # expect: copy to the device at batch, pinned, non-blocking    (or pageable, blocking)
    # expect: note compile                                         (a word of a note)

A broken or slow script is a patch: below its comments it has the lines of its twin that it changes, in blocks.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
KINDS = ("healthy", "broken", "slow")
TRAITS = {"pinned": ("pinned", True), "pageable": ("pinned", False), "blocking": ("blocking", True)}
TRAITS["non-blocking"] = ("blocking", False)
NAMED = {"findings": "code", "copies": "direction", "syncs": "kind"}  # by what an entry of a result is called

_PLACE = r" at (?P<marks>\w+(?: or \w+)*)(?P<extras>(?:, .+)?)"
_EXPECTED = {
    "findings": re.compile(rf"(?P<names>[\w-]+) error{_PLACE}"),
    "syncs": re.compile(rf"(?P<no>no )?sync(?: (?P<names>[\w -]+?))?{_PLACE}"),
    "copies": re.compile(rf"(?P<no>no )?copy (?P<names>to the \w+){_PLACE}"),
}
_MARK = re.compile(r"# <- (\w+)$")
_HEADER = re.compile(r"# (why|twin|style|runs|steps|updates|expect): (.+)")


@dataclass(frozen=True)
class Expectation:
    """One thing that a simulation must say; with `times` 0, must not."""

    said: str  # as it is written in the script
    part: str  # of the result: findings, copies, syncs or notes
    names: tuple[str, ...] = ()  # codes, kinds, a direction or a word; any of them will do, none means any
    lines: frozenset[int] = frozenset()  # any of them
    times: int = 1  # at least
    traits: dict[str, bool] = field(default_factory=dict)  # of a copy
    fix: str = ""  # words of a finding's fix

    def met_by(self, entry: dict[str, Any]) -> bool:
        """Whether one entry of the result is what is meant; how often it happened is not looked at."""
        return (
            entry["line"] in self.lines
            and (not self.names or entry[NAMED[self.part]] in self.names)
            and all(entry[trait] == value for trait, value in self.traits.items())
            and self.fix in entry.get("fix", "")
        )


@dataclass(frozen=True)
class Script:
    """A script of the corpus."""

    path: Path
    text: str
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

    def write(self, folder: Path) -> Path:
        """The script itself, to be run."""
        path = folder / f"{self.path.stem}.py"
        path.write_text(self.text, encoding="utf-8")
        return path


def scripts() -> list[Script]:
    """All scripts of the corpus."""
    return [load(path) for kind in KINDS for path in sorted((SCRIPTS / kind).glob("*.p[ya]*"))]


def load(path: Path) -> Script:
    """Read a script with what it expects; `ValueError` names the line that makes no sense."""
    try:
        text = path.read_text(encoding="utf-8")
        return parse(patched(text) if path.suffix == ".patch" else text, path)
    except ValueError as error:
        raise ValueError(f"{path.parent.name}/{path.name}: {error}") from error


def patched(text: str) -> str:
    """The script that a patch makes of its twin, whose marks mean nothing in it."""
    head, _, changes = text.partition("\n\n")
    twin = (SCRIPTS / "healthy" / dict(_header(head))["twin"]).read_text(encoding="utf-8")
    twin = re.sub(r"  # <- \w+$", "", re.sub(r"\A(#.*\n)+", "", twin), flags=re.MULTILINE)
    made = twin
    for block in changes.strip("\n").split("\n\n"):
        lines = block.splitlines()
        old, new = ("".join(f"\n{line[1:]}" for line in lines if line[0] in (" ", sign)) for sign in "-+")
        if f"\n{made}".count(f"{old}\n") != 1:
            raise ValueError(f"its twin has no such lines, or has them twice:{old}")
        made = f"\n{made}".replace(f"{old}\n", f"{new}\n").removeprefix("\n")
    return f"{head}\n{made}"


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
        text=text,
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
    for part, pattern in _EXPECTED.items():
        if found := pattern.fullmatch(said):
            words = found.groupdict()
            places = words["marks"].split(" or ")
            if missing := [place for place in places if place not in marks]:
                raise ValueError(f"`{said}` means a mark that is not there: {', '.join(missing)}")
            lines = frozenset(line for place in places for line in marks[place])
            extras = {"times": 0 if words.get("no") else 1, **_extras(said, part, words["extras"].split(", ")[1:])}
            names = words["names"].split(" or ") if words["names"] else []
            return Expectation(said, part, tuple(names), lines, **extras)
    raise ValueError(f"`{said}` is neither a finding, a sync, a copy nor a note at a mark")


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
    """What is wrong with the result of a simulation, in words; nothing if it is right."""
    wrong = [_unmet(each, result) for each in script.expectations]
    expected = [each for each in script.expectations if each.part == "findings"]
    for finding in result["findings"]:
        if finding["file"] != f"{script.path.stem}.py" or not any(each.met_by(finding) for each in expected):
            where = f"{finding['file']}:{finding['line']}"
            wrong.append(f"not expected: {finding['code']} ({finding['level']}) at {where}: {finding['message']}")
    if result["completed"] != script.steps:
        wrong.append(f"{result['completed']} steps were completed and not {script.steps}")
    return [words for words in wrong if words]


def _unmet(wanted: Expectation, result: dict[str, Any]) -> str:
    if wanted.part == "notes":
        return "" if any(wanted.names[0] in note for note in result["notes"]) else f"missing: {wanted.said}"
    times = sum(entry["count"] for entry in result[wanted.part] if wanted.met_by(entry))
    if not wanted.times:
        return f"{wanted.said}, but it is there {times} times" if times else ""
    return "" if times >= wanted.times else f"missing: {wanted.said} (line {sorted(wanted.lines)}, seen {times} times)"
