"""Graphs that nobody needs: recorded, checked or kept for no backward pass."""

import ast
from collections.abc import Iterator

from hotloop.apps.doctor.edits import Edit, SourceText, name_of
from hotloop.apps.doctor.rules.base import Candidate, Script, imports, mentions
from hotloop.apps.doctor.seen import Location

NO_GRAD = ("no_grad", "inference_mode", "set_grad_enabled")


def anomaly_mode(script: Script) -> Iterator[Candidate]:
    for file, source in script.sources.items() if script.seen.has_anomaly_mode else ():
        for call in source.calls(None, "set_detect_anomaly", "detect_anomaly"):
            owner = f"{source.code(call.func.value)}." if isinstance(call.func, ast.Attribute) else ""
            can = owner or name_of(call.func) == "set_detect_anomaly"  # the other needs an import
            edits = source.replaced(call, f"{owner}set_detect_anomaly(False)") if can else []
            what = "anomaly detection checks every operation of the backward pass for NaN and keeps a stack for each"
            fix = "turn it on only to find a NaN"
            yield Candidate(Location(file, call.lineno), what, fix, edits)


def evaluates_with_gradients(script: Script) -> Iterator[Candidate]:
    what = "this evaluation records a graph for a backward pass that never comes"
    fix = "evaluate under torch.no_grad()"
    ran = set()
    for call in script.seen.calls:
        source = script.source(call.place)
        if call.has_grad and source is not None:
            ran.add(call.place)
            edits = _without_gradients(source, call.place.line)
            yield Candidate(call.place, what, fix, edits)
    for file, source in script.sources.items():
        for line in _evaluations(source):
            place = Location(file, line)
            if place not in ran and not any(each.place == place for each in script.seen.calls):
                edits = _without_gradients(source, line)
                yield Candidate(place, what, fix, edits, has_run=False)


def keeps_graphs(script: Script) -> Iterator[Candidate]:
    for growth in script.seen.growth:
        source = script.sources.get(growth.file)
        if source is None:
            continue
        loops = source.loops(growth.line)
        for node in ast.walk(loops[0]) if loops else ():
            kept = _kept(node, growth.name)
            if kept is not None and not mentions(kept, "item", "detach"):
                what = f"{growth.name} holds the graph of every earlier step, with what its backward pass would need"
                fix = "keep the value without its graph: .detach()"
                yield Candidate(Location(growth.file, kept.lineno), what, fix, source.detached(kept))


def _kept(node: ast.AST, name: str) -> ast.expr | None:
    """What a statement adds to a variable."""
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
        return node.args[0] if name_of(node.func.value) == name and len(node.args) == 1 else None
    return None


def _without_gradients(source: SourceText, line: int) -> list[Edit]:
    """The outermost loop around a line that trains nothing, or its statement, under `torch.no_grad()`."""
    loops = [loop for loop in source.loops(line) if not mentions(loop, "backward")]
    statement = loops[-1] if loops else next((each for each, _ in source.around(line)), None)
    if statement is None or not imports(source, "torch"):
        return []
    return source.inside("with torch.no_grad():", [statement])


def _evaluations(source: SourceText) -> Iterator[int]:
    """Lines that call a model in a loop after its `.eval()`, with nothing around that turns gradients off."""
    for node in ast.walk(source.tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or _is_without_grad(source, node):
            continue
        models: set[str] = set()
        for statement in body:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                function = statement.value.func
                if isinstance(function, ast.Attribute) and function.attr == "eval":
                    models.add(source.code(function.value))
            if isinstance(statement, ast.For) and not mentions(statement, "backward", *NO_GRAD):
                calls = (each for each in ast.walk(statement) if isinstance(each, ast.Call))
                yield from sorted(each.lineno for each in calls if source.code(each.func) in models)[:1]


def _is_without_grad(source: SourceText, node: ast.AST) -> bool:
    """Whether gradients are turned off around a block: by what it is in, or where its function is called."""
    around = [each for each, _ in source.around(getattr(node, "lineno", 0))]
    functions = [each.name for each in around if isinstance(each, ast.FunctionDef)]
    blocks = (each for each in ast.walk(source.tree) if isinstance(each, ast.With))
    without = (each for each in blocks if any(mentions(item.context_expr, *NO_GRAD) for item in each.items))
    return any(mentions(each, *NO_GRAD) for each in around) or any(mentions(each, *functions) for each in without)
