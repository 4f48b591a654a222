"""Changes of somebody's source that leave every other character as it is."""

import ast
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")  # as Python counts lines: `splitlines` knows more ends


@dataclass(frozen=True, order=True)
class Edit:
    """Characters of a source, from start to end, and what replaces them."""

    start: int
    end: int
    text: str


class SourceText:
    """The text of a file and its syntax tree.

    >>> source = SourceText("loader = DataLoader(data, 8)")
    >>> (call,) = source.calls(1, "DataLoader")
    >>> applied(source.text, source.with_arguments(call, num_workers="2"))
    'loader = DataLoader(data, 8, num_workers=2)'
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)

    @cached_property
    def lines(self) -> list[str]:
        return _LINE.findall(self.text)

    @cached_property
    def _starts(self) -> list[int]:
        """Where each line begins, and the end of the text."""
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line))
        return starts

    @cached_property
    def newline(self) -> str:
        first = self.lines[0] if self.lines else "\n"
        return first[len(first.rstrip("\r\n")) :] or "\n"

    @cached_property
    def indent(self) -> str:
        """What a block is indented with, as the first one has it."""
        inner = (node for node in ast.walk(self.tree) if isinstance(node, ast.stmt) and node.col_offset)
        return next((margin for margin in map(self.margin, inner) if not margin.strip()), "    ")

    # Where things are

    def line(self, number: int) -> str:
        return self.lines[number - 1].strip() if 0 < number <= len(self.lines) else ""

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """The characters of a node; `ast` counts the bytes of a line."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place(node.lineno, node.col_offset), self._place(node.end_lineno, node.end_col_offset)

    def _place(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def code(self, node: ast.expr | ast.stmt) -> str:
        return self.text[slice(*self.span(node))]

    def margin(self, statement: ast.stmt) -> str:
        """What stands before a statement on its line."""
        return self.text[self._starts[statement.lineno - 1] : self.span(statement)[0]]

    def calls(self, line: int | None, *names: str) -> Iterator[ast.Call]:
        """Calls of functions or methods with one of these names, on a line or anywhere."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and name_of(node.func) in names and (line is None or holds(node, line)):
                yield node

    def around(self, line: int) -> list[tuple[ast.stmt, list[ast.stmt]]]:
        """The statements around a line, each with the block that it is in, the innermost first."""
        return list(reversed(list(_around(self.tree.body, line))))

    def loops(self, line: int) -> list[ast.For | ast.While]:
        """The loops around a line within its function, the innermost first."""
        found: list[ast.For | ast.While] = []
        for statement, _ in self.around(line):
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                break
            if isinstance(statement, ast.For | ast.While):
                found.append(statement)
        return found

    # Changes; an empty list is one that cannot be made

    def with_arguments(self, call: ast.Call, **arguments: str) -> list[Edit]:
        """A call with these keyword arguments, whether it has them already or not."""
        given = {keyword.arg: keyword for keyword in call.keywords}
        edits = [self.replaced(given[name].value, code)[0] for name, code in arguments.items() if name in given]
        added = ", ".join(f"{name}={code}" for name, code in arguments.items() if name not in given)
        if not added:
            return edits
        given_ends = [self.span(each)[1] for each in call.args] + [self.span(each)[1] for each in call.keywords]
        # After the last argument; where a bracket follows that belongs to no node, before the call's own.
        ends = [*sorted(given_ends)[-1:], self.span(call)[1] - 1]
        tried = ([*edits, Edit(end, end, f", {added}" if given_ends else added)] for end in ends)
        return next(filter(self._is_sound, tried), [])

    def without(self, statement: ast.stmt, block: Sequence[ast.stmt]) -> list[Edit]:
        """A block without one of its statements."""
        start, end = self.span(statement)
        first, last = self._starts[statement.lineno - 1], self._starts[statement.end_lineno or statement.lineno]
        before, after = self.text[first:start], self.text[end:last]
        is_alone = not before.strip() and not after.partition("#")[0].strip()
        return [Edit(first, last, "")] if len(block) > 1 and is_alone else [Edit(start, end, "pass")]

    def replaced(self, node: ast.expr, code: str) -> list[Edit]:
        return [Edit(*self.span(node), code)]

    def detached(self, node: ast.expr) -> list[Edit]:
        """`.detach()` after an expression."""
        start, end = self.span(node)
        if isinstance(node, ast.Name | ast.Call | ast.Attribute | ast.Subscript):
            return [Edit(end, end, ".detach()")]
        return [Edit(start, start, "("), Edit(end, end, ").detach()")]

    def inside(self, header: str, statements: Sequence[ast.stmt]) -> list[Edit]:
        """Statements that follow one another, as the block of a header such as `with torch.no_grad():`.

        Lines are indented only where that leaves the statements the same: a string may go over several.
        """
        first, last = statements[0].lineno, statements[-1].end_lineno or statements[-1].lineno
        margin = self.margin(statements[0])
        if margin.strip():
            return []
        begin, end = self._starts[first - 1], self._starts[last]
        moved = "".join(self.indent + line if line.strip() else line for line in self.lines[first - 1 : last])
        edit = Edit(begin, end, f"{margin}{header}{self.newline}{moved}")
        try:
            now = SourceText(applied(self.text, [edit]))
        except SyntaxError:
            return []
        headed = (node for node in ast.walk(now.tree) if isinstance(node, ast.With) and node.lineno == first)
        body = [each for node in headed for each in node.body]
        return [edit] if [ast.dump(each) for each in body] == [ast.dump(each) for each in statements] else []

    def before(self, statement: ast.stmt, code: str) -> list[Edit]:
        """A line of its own before a statement."""
        margin, start = self.margin(statement), self._starts[statement.lineno - 1]
        return [] if margin.strip() else [Edit(start, start, f"{margin}{code}{self.newline}")]

    def after(self, statement: ast.stmt, code: str) -> list[Edit]:
        """A line of its own after a statement."""
        margin, end = self.margin(statement), self._starts[statement.end_lineno or statement.lineno]
        if margin.strip() or not self.text[:end].endswith(("\n", "\r")):
            return []
        return [Edit(end, end, f"{margin}{code}{self.newline}")]

    def after_imports(self, code: str) -> list[Edit]:
        """A line of its own after the imports at the top."""
        imports = [each for each in self.tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
        blank = "" if code.startswith("import ") else self.newline
        return self.after(imports[-1], f"{blank}{code}") if imports else []

    def _is_sound(self, edits: Sequence[Edit]) -> bool:
        """Whether the result is Python: brackets around an argument do not belong to its node."""
        try:
            ast.parse(applied(self.text, edits))
        except SyntaxError:
            return False
        return True


def applied(text: str, edits: Sequence[Edit]) -> str:
    """The text with all of these edits; a `ValueError` where one changes what another one does.

    Those of one place come in the order in which they are given.
    """
    parts, at = [], 0
    for edit in sorted(edits, key=lambda each: (each.start, each.end)):
        if edit.start < at:
            raise ValueError("two edits of the same characters")
        parts += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join((*parts, text[at:]))


def diff_of(changes: Mapping[str, tuple[str, str]]) -> str:
    """The changes of files, each before and after, as `patch -p1` and `git apply` take them.

    >>> print(diff_of({"train.py": ("x = 1", "x = 2")}), end="")
    --- a/train.py
    +++ b/train.py
    @@ -1 +1 @@
    -x = 1
    \\ No newline at end of file
    +x = 2
    \\ No newline at end of file
    """
    parts = []
    for name, (before, after) in changes.items():
        old, new = _LINE.findall(before), _LINE.findall(after)
        for line in difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"):
            parts.append(line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n")
    return "".join(parts)


def name_of(function: ast.expr) -> str:
    """The last part of a dotted name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def holds(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or line)


def _around(block: list[ast.stmt], line: int) -> Iterator[tuple[ast.stmt, list[ast.stmt]]]:
    for statement in block:
        first = min((d.lineno for d in getattr(statement, "decorator_list", ())), default=statement.lineno)
        if first <= line <= (statement.end_lineno or line):
            yield statement, block
            for name in ("body", "orelse", "finalbody"):
                yield from _around(getattr(statement, name, []), line)
            for handler in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                yield from _around(handler.body, line)
