"""Where a script says its batch: names that mean it, and the places in its text that could be set."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

from hotloop.errors import BadArgument
from hotloop.printing.text import printable

HOW = "argument:--NAME, variable:NAME, environment:NAME, loader, or loader:LINE where it is made"
_SURE = re.compile(r"(batch(_?size)?|bsz?)")
_LIKELY = re.compile(
    r"((train(ing)?|per_device|per_gpu|device|local|global|total|micro|mini)_?)+(batch(_?size)?|bsz?)"
    r"|(batch(_?size)?|bsz?)_?train(ing)?"
)
_ENVIRONMENT = {"getenv", "environ.get"}


@dataclass(frozen=True)
class Way:
    """A place of the batch that somebody pointed at."""

    kind: str  # argument, variable, environment or loader
    name: str  # of it; a loader may be named by the line where it is made

    @classmethod
    def parsed(cls, words: str) -> Self:
        """Read what was given as --batch-from.

        >>> Way.parsed("argument:--micro")
        Way(kind='argument', name='--micro')
        """
        kind, _, name = words.partition(":")
        if kind not in ("argument", "variable", "environment", "loader"):
            raise BadArgument(f"{printable(words)!r} is no place of a batch", fix=f"give {HOW}")
        if kind == "loader" and words != "loader" and not name.isdecimal():
            raise BadArgument(f"{printable(name)!r} is no line of a loader", fix="give its number, as in loader:12")
        if kind != "loader" and not name:
            raise BadArgument(f"which {kind} is the batch?", fix=f"name it, as in {kind}:NAME")
        return cls(kind, name)


@dataclass(frozen=True)
class Spot:
    """An integer written in a script: its bytes on a line, as Python counts them."""

    value: int
    line: int  # from 1
    start: int
    end: int


@dataclass(frozen=True)
class ScriptText:
    """What the text of a script shows."""

    variables: dict[str, tuple[Spot, ...]] = field(default_factory=dict)  # all that are given an integer
    environment: dict[str, int | None] = field(default_factory=dict)  # names like batch read from it → what else
    options: bool = False  # whether it seems to have an option for the batch
    parsers: tuple[str, ...] = ()  # packages that read command lines, other than argparse


def rank(name: str) -> int | None:
    """How surely a name means the batch of the training: 0 the surest, None not at all.

    >>> rank("--batch-size"), rank("TRAIN_BATCH_SIZE"), rank("test_batch_size"), rank("batches")
    (0, 1, None, None)
    """
    plain = name.lstrip("-").lower().replace("-", "_")
    if _SURE.fullmatch(plain):
        return 0
    return 1 if _LIKELY.fullmatch(plain) else None


def look(source: str) -> ScriptText:
    """Read a script without running it; one that Python cannot read shows nothing."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ScriptText()
    variables: dict[str, list[Spot]] = {}
    environment: dict[str, int | None] = {}
    parsers: list[str] = []
    options = False
    for node in ast.walk(tree):
        for name, value in _named(node):
            if (spot := _spot(value)) is not None:
                variables.setdefault(name, []).append(spot)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            options = options or (node.value.startswith("-") and rank(node.value) is not None)
        environment |= {name: default for name, default in _read(node) if rank(name) is not None}
        parsers += [name for name in _imported(node) if name in ("click", "typer")]
    found = {name: tuple(spots) for name, spots in variables.items()}
    return ScriptText(found, environment, options, tuple(dict.fromkeys(parsers)))


def batch_variables(seen: ScriptText) -> list[str]:
    """The variables that most surely hold the batch: one where it is clear, several where it is not.

    >>> batch_variables(look("batch_size, micro_batch = 8, 2"))
    ['batch_size']
    """
    likely = {name: place for name in seen.variables if (place := rank(name)) is not None}
    best = min(likely.values(), default=0)
    return [name for name, place in likely.items() if place == best]


def value_of(seen: ScriptText, name: str) -> int | None:
    """What a variable is given, where that is the same everywhere."""
    values = {spot.value for spot in seen.variables.get(name, ())}
    return values.pop() if len(values) == 1 else None


def rewritten(source: str, spots: tuple[Spot, ...], value: int) -> str:
    """A script in which integers are others; every line stays where it is.

    >>> rewritten("batch = 8  # items", look("batch = 8  # items").variables["batch"], 96)
    'batch = 96  # items'
    """
    lines = source.split("\n")  # as Python counts them; `splitlines` knows more ends than it does
    for spot in sorted(spots, key=lambda spot: (spot.line, spot.start), reverse=True):
        line = lines[spot.line - 1].encode()
        lines[spot.line - 1] = (line[: spot.start] + str(value).encode() + line[spot.end :]).decode()
    return "\n".join(lines)


def _named(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names and what they are given: assignments, those of several at once, defaults, entries of a dictionary."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _pairs(target, node.value)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield from _pairs(node.target, node.value)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, value
    elif isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        for argument, default in zip(reversed(positional), reversed(node.defaults), strict=False):
            yield argument.arg, default
        for argument, given in zip(node.kwonlyargs, node.kw_defaults, strict=True):
            if given is not None:
                yield argument.arg, given


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Attribute):
        yield target.attr, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for left, right in zip(target.elts, value.elts, strict=False):
            yield from _pairs(left, right)


def _spot(value: ast.expr) -> Spot | None:
    """A positive integer; a counter that begins with 0 is no batch."""
    if not isinstance(value, ast.Constant) or type(value.value) is not int or value.value < 1:
        return None
    assert value.end_col_offset is not None
    return Spot(value.value, value.lineno, value.col_offset, value.end_col_offset)


def _read(node: ast.AST) -> Iterator[tuple[str, int | None]]:
    """Names that are read from the environment, and the number that is taken where they are not there."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("os.") in _ENVIRONMENT:
        name, default, *_ = (*(getattr(given, "value", None) for given in node.args), None, None)
        if isinstance(name, str):
            yield name, int(default) if isinstance(default, int | str) and str(default).isdecimal() else None
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        name = node.slice.value
        if isinstance(name, str) and ast.unparse(node.value).removeprefix("os.") == "environ":
            yield name, None


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module.split(".")[0]
