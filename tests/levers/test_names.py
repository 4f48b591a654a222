"""What the package does about a lever stands on its class: no other file knows one by its name."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import hotloop
from hotloop.levers import LEVERS
from hotloop.plan import Compile, Plan, Precision, Stream

PACKAGE = Path(hotloop.__file__).parent
NAMES = {lever.name for lever in LEVERS}
# Words that mean something else too: settings of a plan and their values, the folder of compiled kernels.
COMMON = {field.name for field in fields(Plan)} | {
    *get_args(Compile),
    *get_args(Precision),
    *get_args(Stream),
    "kernels",
}
ASKED = {"name", "lever", "levers", "dropped", "names", "pulled"}  # by which levers are asked for their names


def words_in(node: ast.AST) -> set[Any]:
    """The strings of a literal, a set or a sequence of them."""
    within = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return {each.value for each in within if isinstance(each, ast.Constant)}


def is_of_levers(node: ast.AST) -> bool:
    word = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return word.lstrip("_") in ASKED


def known_by_name(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines in which the name of a lever stands as a string, where nothing else can be meant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in NAMES - COMMON:
            yield node.lineno, node.value
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(is_of_levers, sides)):
                yield from ((node.lineno, word) for side in sides for word in words_in(side) & NAMES)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "drop" in node.func.attr:
            yield from ((node.lineno, word) for each in node.args for word in words_in(each) & NAMES)


def own_lines(tree: ast.AST) -> set[int]:
    """The lines in which a class of a lever gives its name."""
    return {
        line.lineno
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef)
        for line in each.body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "name"
    }


def test_no_lever_is_known_by_its_name() -> None:
    found = []
    for file in sorted({*PACKAGE.rglob("*.py")} - {PACKAGE / "plan.py"}):  # which knows its settings
        tree = ast.parse(file.read_text(encoding="utf-8"))
        own = own_lines(tree) if file.parent.name == "levers" else set()
        where = file.relative_to(PACKAGE)
        found += [f"{where}:{line}: {name!r}" for line, name in known_by_name(tree) if line not in own]
    assert not found, "ask the lever: an attribute or a method of its class says it"


SEEN = """
ORDER = ("row kernels", "tf32")
x = lever.name == "graph"
x = trial.lever in ("bf16", "fp16")
x = "graph" in self._dropped
self._drop("graph", why)
words = {"channels last": "channels_last"}
"""


def test_it_would_be_seen_and_settings_of_plans_are_no_levers() -> None:
    for line in SEEN.strip().splitlines():
        assert list(known_by_name(ast.parse(line))), line
    for line in ('x = plan.precision == "bf16"', 'x = stream == "resident"', 'others.append("compile")'):
        assert not list(known_by_name(ast.parse(line))), line
