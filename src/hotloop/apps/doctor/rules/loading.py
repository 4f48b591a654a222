"""Batches that come too late."""

import ast
from collections.abc import Iterator

from hotloop.apps.doctor.edits import Edit, SourceText, name_of
from hotloop.apps.doctor.rules.base import Candidate, Script, imports, mentions
from hotloop.apps.doctor.seen import COPIES, Location, SeenLoader
from hotloop.printing.text import duration, plural

NOTABLE = 0.1  # of a step


def waits_for_items(script: Script) -> Iterator[Candidate]:
    seen = script.seen
    for loader, made, source, call in _made(script):
        share = _share(loader, script)
        if loader.is_constant or share < NOTABLE:
            continue
        who = plural(loader.workers, "worker process", "worker processes") if loader.workers else "this process"
        what = (
            f"{share:.0%} of a step ({duration(loader.wait)} of {duration(seen.step)}) is waiting for items, which "
            f"{who} {'makes' if loader.workers < 2 else 'make'}"
        )
        if loader.enough <= loader.workers or loader.is_iterable:
            yield Candidate(made, what, "do the slow part of __getitem__ once, beforehand, and keep the result")
            continue
        edits = _with_arguments(loader, source, call, num_workers=str(loader.enough), persistent_workers="True")
        workers = plural(loader.enough, "worker process", "worker processes")
        stay = "stay" if loader.enough > 1 else "stays"
        fix = f"make them in {workers} that {stay} for all epochs, if the dataset does not change between them"
        yield Candidate(made, what, fix, edits)


def restarts_workers(script: Script) -> Iterator[Candidate]:
    for loader, made, source, call in _made(script):
        if not loader.workers or loader.is_persistent or loader.epochs < 2:
            continue
        edits = _with_arguments(loader, source, call, persistent_workers="True")
        what = (
            f"{plural(loader.workers, 'worker')} start anew in every epoch; its first batch comes after "
            f"{duration(loader.start)}"
        )
        fix = "keep the workers: persistent_workers=True"
        yield Candidate(made, what, fix, edits)


def items_one_by_one(script: Script) -> Iterator[Candidate]:
    for loader in script.seen.loaders:
        share = _share(loader, script)
        if loader.is_constant and loader.is_plain and loader.read is not None and share >= NOTABLE:
            what = (
                f"{share:.0%} of a step ({duration(loader.wait)} of {duration(script.seen.step)}) is collating tensors "
                "that are in memory already, item by item"
            )
            fix = "take whole batches by index, the same ones: hotloop.stream, which keeps the data on a GPU"
            edits = _streamed(script, loader)
            yield Candidate(loader.read, what, fix, edits)


def pageable_copies(script: Script) -> Iterator[Candidate]:
    seen = script.seen
    copies = seen.often(COPIES)
    for loader, made, source, call in _made(script):
        if not seen.on_gpu or loader.is_pinned or not copies:
            continue
        edits = {made.file: _with_arguments(loader, source, call, pin_memory="True")}
        for line in copies:
            copied = script.source(line.place)
            for moved in () if copied is None else copied.calls(line.place.line, "to", "cuda"):
                if copied is not None and not any(each.arg == "non_blocking" for each in moved.keywords):
                    edits.setdefault(line.place.file, []).extend(copied.with_arguments(moved, non_blocking="True"))
        what = "batches are copied to the GPU from pageable memory, and the host waits for each copy"
        fix = "pin the batches and copy them without waiting: pin_memory=True, .to(device, non_blocking=True)"
        yield Candidate(made, what, fix, elsewhere=edits)


def _made(script: Script) -> Iterator[tuple[SeenLoader, Location, SourceText, ast.Call]]:
    """The loaders that training reads, each with the one call on a line that makes it."""
    for loader in script.seen.loaders:
        found = script.call_at(loader.made, "DataLoader")
        if found is not None and loader.made is not None:
            yield loader, loader.made, *found


def _with_arguments(loader: SeenLoader, source: SourceText, call: ast.Call, **arguments: str) -> list[Edit]:
    """The call with these arguments; no edit where it has one of them by its place or in `**kwargs`."""
    named = {keyword.arg for keyword in call.keywords}
    hidden = arguments.keys() & {*loader.given} - named
    return [] if hidden else source.with_arguments(call, **arguments)


def _share(loader: SeenLoader, script: Script) -> float:
    return loader.wait / script.seen.step if script.seen.step else 0.0


def _streamed(script: Script, loader: SeenLoader) -> list[Edit]:
    """Edits that let the loop read its batches from `hotloop.stream`, made once, before all epochs."""
    source, place = script.source(loader.read), loader.read
    if source is None or place is None or not loader.name:
        return []
    loops, last = source.loops(place.line), loader.name.rsplit(".", 1)[-1]
    reading = next((loop for loop in loops if isinstance(loop, ast.For) and mentions(loop.iter, last)), None)
    if reading is None:
        return []
    if script.seen.on_gpu and loader.epochs > 1 and len(loops) == 1:  # a function that is called in each epoch
        return []  # would copy the data to the GPU each time
    names = (node for node in ast.walk(reading.iter) if isinstance(node, ast.Name | ast.Attribute))
    used = [node for node in names if source.code(node) == loader.name]
    name = "batches" if "batches" not in source.text else "device_batches"
    device = loader.device or f'"{script.seen.device}"'
    made = source.before(loops[-1], f"{name} = hotloop.stream({loader.name}, {device})")
    is_there = imports(source, "hotloop")
    brought = [] if is_there else source.after_imports("import hotloop")
    if len(used) != 1 or _is_bound(loops[-1], last) or not made or not (brought or is_there):
        return []
    return [*brought, *made, *source.replaced(used[0], name)]


def _is_bound(loop: ast.AST, name: str) -> bool:
    """Whether a name gets another value inside."""
    return any(
        isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store) and name_of(node) == name
        for node in ast.walk(loop)
    )
