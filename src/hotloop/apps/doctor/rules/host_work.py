"""What the host does, or waits for, in every step."""

import ast
from collections.abc import Iterator

from hotloop.apps.doctor.edits import Edit, SourceText, name_of
from hotloop.apps.doctor.rules.base import Candidate, Script, mentions
from hotloop.apps.doctor.seen import COLLECTS, EMPTIES, OPERATIONS, READS, SYNCHRONIZES, SeenLine
from hotloop.printing.text import count

MANY = 200  # operations that one line starts in a step


def reads_each_step(script: Script) -> Iterator[Candidate]:
    for line in script.seen.often(READS):
        source = script.source(line.place)
        if source is None:
            continue
        edits = _read_at_the_end(source, line.place.line)
        what = "the host reads a value here in every step, and waits until the GPU has computed it"
        fix = (
            "keep the value on the device and read it after the loop"
            if edits
            else "keep the value on the device (.detach()), and read it once in a while or after the loop"
        )
        yield Candidate(line.place, what, fix, edits)


def pauses(script: Script) -> Iterator[Candidate]:
    for line in script.seen.often(EMPTIES, SYNCHRONIZES):
        if line.what == EMPTIES:
            what = "the allocator gives its memory back to the driver in every step, and asks for it again"
        else:
            what = "the host waits here until the GPU has done everything, in every step"
        yield _without(script, line, what, "leave it out: PyTorch waits and reuses memory by itself")


def collects_garbage(script: Script) -> Iterator[Candidate]:
    for line in script.seen.often(COLLECTS):
        what = "Python looks through all of its objects here in every step"
        yield _without(script, line, what, "leave it out: tensors are freed as soon as nothing refers to them")


def loops_over_values(script: Script) -> Iterator[Candidate]:
    for line in script.seen.lines:
        source = script.source(line.place)
        if line.what != OPERATIONS or line.times < MANY or source is None:
            continue
        loops = source.loops(line.place.line)
        if not loops or mentions(loops[0], "backward"):  # the training loop itself
            continue
        what = f"this line starts {count(line.times)} operations in a step, in a Python loop"
        yield Candidate(line.place, what, "compute all values in one operation: index, broadcast, torch.where, einsum")


def _without(script: Script, line: SeenLine, what: str, fix: str) -> Candidate:
    """The same without the call, if it stands by itself: nobody uses its result."""
    source, name = script.source(line.place), line.what.removesuffix("()").rsplit(".", 1)[-1]
    edits: list[Edit] = []
    for _, block in source.around(line.place.line)[:1] if source is not None else ():
        calls = [each for each in block if each.lineno == line.place.line and _calls(each, name)]
        if source is not None and len(calls) == 1:
            edits = source.without(calls[0], block)
    return Candidate(line.place, what, fix, edits)


def _calls(statement: ast.stmt, name: str) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and name_of(statement.value.func) == name
    )


def _read_at_the_end(source: SourceText, line: int) -> list[Edit]:
    """`total += loss.item()` in a loop: the tensor is added up on the device, and becomes a number after the loop.

    In fp64, as Python adds numbers, so that the sum is the same.
    """
    loops = source.loops(line)
    statement = next((each for each, _ in source.around(line)), None)
    if not loops or not isinstance(statement, ast.AugAssign) or not isinstance(statement.target, ast.Name):
        return []
    reads = [
        node
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item"
    ]
    name = statement.target.id
    uses = [node for node in ast.walk(loops[0]) if isinstance(node, ast.Name) and node.id == name]
    if len(reads) != 1 or len(uses) != 1 or not isinstance(statement.op, ast.Add):
        return []
    (read,) = reads
    assert isinstance(read.func, ast.Attribute)
    after = source.after(loops[0], f"{name} = float({name})")
    return [*source.replaced(read, f"{source.code(read.func.value)}.detach().double()"), *after] if after else []
