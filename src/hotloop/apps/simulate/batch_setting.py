"""The batch of a script, set where a person says that the script takes it; the script itself stays as it is."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hotloop.errors import BadArgument
from hotloop.printing.text import printable
from hotloop.records import Record

HOW = "--batch 8 --batch-from argument:--batch-size; or variable:NAME, or environment:NAME"


@dataclass(frozen=True)
class BatchSetting(Record):
    """A batch, and the argument, variable or name in the environment that says it."""

    kind: str
    name: str
    size: int

    @classmethod
    def parsed(cls, words: str, size: int) -> Self:
        """Read what was given as --batch-from.

        >>> BatchSetting.parsed("argument:--micro", 8)
        BatchSetting(kind='argument', name='--micro', size=8)
        """
        kind, _, name = words.partition(":")
        if kind not in ("argument", "variable", "environment") or not name:
            raise BadArgument(f"--batch-from {printable(words)} is no place of a batch", fix=f"write it as in {HOW}")
        if size < 1:
            raise BadArgument(f"a batch of {size}", fix="give at least 1")
        return cls(kind, name, size)

    def check(self, script: Path) -> None:
        """Refuse a variable that the script gives no integer; one that Python cannot read is not judged."""
        try:
            tree = ast.parse(script.read_bytes())
        except (SyntaxError, ValueError):
            return
        if self.kind == "variable" and not self.rewrite(tree):
            raise BadArgument(
                f"{printable(script.name)} gives no variable {printable(self.name)} an integer",
                fix=f"say where it takes its batch, as in {HOW}",
            )

    def arguments(self, given: Sequence[str]) -> tuple[str, ...]:
        """The script's arguments, with the batch where an option says it.

        >>> BatchSetting.parsed("argument:--micro", 8).arguments(["--micro", "2", "--epochs=3"])
        ('--epochs=3', '--micro', '8')
        """
        if self.kind != "argument":
            return tuple(given)
        others = list(given)
        while self.name in others:
            at = others.index(self.name)
            del others[at : at + 2]
        return (*(each for each in others if not each.startswith(f"{self.name}=")), self.name, str(self.size))

    def rewrite(self, tree: ast.AST) -> int:
        """Put the batch in place of each integer that the variable is given; how many there were."""
        if self.kind != "variable":
            return 0
        integers = [value for node in ast.walk(tree) for name, value in _given(node) if name == self.name]
        found = [each for each in integers if isinstance(each, ast.Constant) and type(each.value) is int]
        for each in found:
            each.value = self.size
        return len(found)

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


def _given(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names and what they are given: by assignments, defaults, arguments by name, and entries of a dictionary."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from _pairs(target, node.value)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield from _pairs(node.target, node.value)
    elif isinstance(node, ast.keyword) and node.arg is not None:
        yield node.arg, node.value
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
