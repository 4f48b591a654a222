"""Runs the file on a GPU and looks at how its loop copies."""

from collections.abc import Iterator

from hotloop.apps.learn.judging import CheckVerdict, Ran

ON = ("gpu",)


def check(ran: Ran) -> Iterator[CheckVerdict]:
    copies = [copy for copy in ran.copies() if copy.direction == "to the device"]
    pageable = [copy for copy in copies if not copy.pinned]
    blocking = [copy for copy in copies if copy.blocking]
    hint = "the batches come from pageable memory: DataLoader(…, pin_memory=True)"
    if pageable and not blocking:
        hint = "non_blocking=True gains nothing from pageable memory: DataLoader(…, pin_memory=True) as well"
    yield CheckVerdict("the batches come from pinned memory", not pageable, hint)
    hint = "the CPU waits for each copy: x.to(device, non_blocking=True)"
    if 0 < len(blocking) < len(copies):
        hint = f"a copy in line {blocking[0].line} still waits: every tensor of the batch needs non_blocking=True"
    elif blocking and not pageable:
        hint = "the memory is pinned, but .to still waits: x.to(device, non_blocking=True)"
    yield CheckVerdict("the CPU does not wait for a copy", not blocking, hint)
    pinned_here = [call for call in ran.calls("pin_memory") if ran.in_loops(call.lineno)]
    yield CheckVerdict(
        "the loop pins nothing itself",
        not pinned_here,
        "x.pin_memory() in the loop is another copy, made by the CPU while the GPU waits: let the loader do it",
    )
    waits = [wait for wait in ran.waits() if wait.kind != "synchronization"]
    line = waits[0].line if waits else 0
    yield CheckVerdict("nothing else waits in the loop", not waits, f"line {line} makes the CPU wait in every step")
    yield CheckVerdict(
        "all 8 batches are trained on", ran["steps"] == 8, f"there were {ran['steps']} steps: go through the loader"
    )
