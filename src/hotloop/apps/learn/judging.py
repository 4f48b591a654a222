"""What the checks of exercises share: a run of the learner's file, verdicts, and questions about its source."""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.records import Record

if TYPE_CHECKING:
    from hotloop.apps.learn.lab import GpuRecord


@dataclass(frozen=True)
class CheckVerdict(Record):
    """One check: what it asks for, whether that is so, and what to do where it is not."""

    what: str
    right: bool
    hint: str = ""


class Gone(Exception):
    """A name that a check looks at is not made by the file any more."""


@dataclass
class Ran:
    """A learner's file after it was run, on one kind of device."""

    file: Path
    source: str
    on: str  # cpu or gpu
    namespace: dict[str, Any] = field(default_factory=dict)
    output: str = ""
    error: BaseException | None = None
    line: int | None = None  # of the file, where the error was
    seen: "GpuRecord | None" = None  # what happened on the GPU
    watched: Any = None  # what the exercise's own `watch()` noted
    cpu: "Ran | None" = None  # the run without a GPU, where the exercise asks for both

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    def __getitem__(self, name: str) -> Any:
        """A variable of the file."""
        if name not in self.namespace:
            raise Gone(name)
        return self.namespace[name]

    def calls(self, name: str, within: ast.AST | None = None) -> list[ast.Call]:
        """Calls of a function or method by the end of its name.

        >>> ran = Ran(Path("a.py"), "model.eval()\\nx.to(device)", "cpu")
        >>> len(ran.calls("eval")), len(ran.calls("model.eval")), len(ran.calls("other.eval"))
        (1, 1, 0)
        """
        found = []
        for node in ast.walk(within or self.tree):
            if isinstance(node, ast.Call):
                words = ast.unparse(node.func)
                if words == name or words.endswith(f".{name}"):
                    found.append(node)
        return found

    def function(self, name: str) -> ast.FunctionDef:
        """A function or method that the file defines."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
        raise Gone(name)

    def text(self, node: ast.AST) -> str:
        """The source of a statement or expression."""
        return ast.get_source_segment(self.source, node) or ""

    def discarded(self, method: str) -> list[str]:
        """Calls of a method whose result nobody keeps, such as a line that says `x.to(device)` and nothing else."""
        lone = [node.value for node in ast.walk(self.tree) if isinstance(node, ast.Expr)]
        return [
            ast.unparse(call)
            for call in lone
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == method
        ]

    def lines(self, node: ast.AST) -> range:
        """The lines of a statement."""
        return range(node.lineno, (node.end_lineno or node.lineno) + 1)  # type: ignore[attr-defined]

    def in_loops(self, line: int) -> bool:
        """Whether a line is in the body of a `for` or `while`."""
        loops = [node for node in ast.walk(self.tree) if isinstance(node, ast.For | ast.While)]
        return any(line in range(loop.body[0].lineno, (loop.end_lineno or 0) + 1) for loop in loops)

    def mismatches(self) -> list[Any]:
        """Operations of the file that were given tensors of two devices; a simulated GPU tells of all of them."""
        return list(self.seen.mismatches) if self.seen is not None else []

    def copies(self, *, loops: bool = True) -> list[Any]:
        """Copies between host and device that the file makes, those in loops alone if asked for."""
        return self._mine(self.seen.copies if self.seen else (), loops)

    def waits(self, *, loops: bool = True) -> list[Any]:
        """Where the host waits for the device."""
        return self._mine(self.seen.waits if self.seen else (), loops)

    def _mine(self, found: Sequence[Any], loops: bool) -> list[Any]:
        mine = [each for each in found if Path(each.file).name == self.file.name]
        return [each for each in mine if self.in_loops(each.line)] if loops else mine


RUNS = "the file runs to its end"
MEMORY = ("allocate memory", "not enough memory", "out of memory")  # in errors that have no type of their own
Check = Callable[[Ran], Iterator[CheckVerdict]]


def judge(ran: Ran, check: Check) -> list[CheckVerdict]:
    """The verdicts: whether the file runs at all, then those of the exercise."""
    verdicts = [first(ran)]
    try:
        for verdict in check(ran):
            verdicts.append(verdict)  # those before an error stay
    except Gone as gone:
        verdicts.append(
            CheckVerdict(
                f"`{gone}` is there",
                False,
                f"the check looks at `{gone}`, and the file does not make it: put it back under this name",
            )
        )
    except Exception as error:  # noqa: BLE001  # whatever a learner's objects do when they are looked at
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        verdicts.append(CheckVerdict("the result can be looked at", False, f"looking at it failed with {told}"))
    return verdicts


def first(ran: Ran) -> CheckVerdict:
    """Whether the file runs to its end."""
    for each in (ran.cpu, ran):
        if each is not None and each.error is not None:
            where = "" if ran.cpu is None else f" on the {each.on.upper()}"
            return CheckVerdict(RUNS, False, f"{_place(each)}{where}: {explain(each.error)}")
    if ran.seen is not None and ran.seen.mismatches:
        found = ran.seen.mismatches[0]
        fix = found.fix.splitlines()[0].replace(str(ran.file), ran.file.name)
        what = found.message.splitlines()[0]
        return CheckVerdict(RUNS, False, f"line {found.line}: {what}. The line to write: {fix}")
    return CheckVerdict(RUNS, True)


def _place(ran: Ran) -> str:
    return "it ends early" if ran.line is None else f"it ends at line {ran.line}"


def explain(error: BaseException) -> str:
    """An error of a learner's file in words."""
    words = str(error)
    if isinstance(error, SystemExit):
        return "it ends itself with sys.exit(), so nothing after that line runs: take that line out"
    if isinstance(error, EOFError):
        return "it asks for input(), and nobody is there to answer: write the value into the file"
    if isinstance(error, UnboundLocalError | NameError):
        return f"{words}. Was the line that makes it deleted, or is it spelt in another way?"
    if isinstance(error, ModuleNotFoundError):
        return f"{words}; the exercises need nothing but torch and hotloop"
    if isinstance(error, MemoryError) or any(part in words.lower() for part in MEMORY):
        return f"it asks for more memory than there is: {words.splitlines()[0]}"
    return f"{type(error).__name__}: {words.splitlines()[0] if words else 'without a message'}"
