"""`ScriptRule`, and the `Script` that rules read."""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hotloop.apps.doctor.diagnosis import Tier
from hotloop.apps.doctor.edits import Edit, SourceText, name_of
from hotloop.apps.doctor.seen import Location, SeenCall, SeenScript


@dataclass(frozen=True)
class Candidate:
    """A suspicion of a rule and, where the change can be made for the person, its edits."""

    place: Location
    what: str
    fix: str
    edits: Sequence[Edit] = ()  # of the file of the place
    elsewhere: Mapping[str, Sequence[Edit]] = field(default_factory=dict)  # of other files
    has_run: bool = True  # the line ran while the script was watched; if not, an epoch is cut short to reach it

    @property
    def by_file(self) -> dict[str, list[Edit]]:
        every = {file: list(edits) for file, edits in self.elsewhere.items()}
        every.setdefault(self.place.file, []).extend(self.edits)
        return every


@dataclass(frozen=True)
class ScriptRule:
    """One way to waste time or memory."""

    name: str
    tier: Tier
    find: "Callable[[Script], Iterator[Candidate]]"


@dataclass(frozen=True)
class Script:
    """A script: what a run of it showed, and its sources by path."""

    main: str  # path
    seen: SeenScript
    sources: Mapping[str, SourceText]

    def source(self, place: Location | None) -> SourceText | None:
        return None if place is None else self.sources.get(place.file)

    def call_at(self, place: Location | None, *names: str) -> tuple[SourceText, ast.Call] | None:
        """The call of one of these names on a line, if there is just one."""
        source = self.source(place)
        if source is None or place is None:
            return None
        calls = list(source.calls(place.line, *names))
        return (source, calls[0]) if len(calls) == 1 else None

    def at_start(self, code: str) -> dict[str, list[Edit]]:
        """A line after the imports of the script."""
        source = self.sources.get(self.main)
        return {self.main: source.after_imports(code)} if source and imports(source, "torch") else {}

    @property
    def training(self) -> list[SeenCall]:
        """Calls of models that are trained."""
        return [call for call in self.seen.calls if call.is_trained]


def imports(source: SourceText, module: str) -> bool:
    """Whether a file imports a module by its own name, at the top."""
    return any(
        isinstance(node, ast.Import) and any(each.name == module and each.asname is None for each in node.names)
        for node in source.tree.body
    )


def mentions(node: ast.AST, *names: str) -> bool:
    """Whether one of these names is read or called inside."""
    return any(name_of(each) in names for each in ast.walk(node) if isinstance(each, ast.Name | ast.Attribute))
