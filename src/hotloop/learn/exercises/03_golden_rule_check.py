"""Runs the file on a GPU: model, batches and what the model makes itself must be there."""

from collections.abc import Iterator

from hotloop.learn.judging import CheckVerdict, Ran

ON = ("gpu",)


def check(ran: Ran) -> Iterator[CheckVerdict]:
    yield CheckVerdict(
        "the model is on the GPU",
        next(ran["model"].parameters()).device.type == "cuda",
        "everything agrees now because the model is on the CPU: leave it on `device`, and move the rest to it",
    )

    forward = ran.function("forward")
    lines = {found.line for found in ran.mismatches() if "variable places" in found.message} | {ran.line}
    source = ran.text(forward)
    hint = "torch.arange makes its numbers on the CPU; give it the device of the input: device=text.device"
    named = any(word in source for word in ('"cuda', "'cuda", ".cuda("))
    if named:
        hint = 'a fixed "cuda" in forward breaks the file on machines without a GPU: write device=text.device'
    yield CheckVerdict(
        "what `forward` makes is where its input is", not lines & set(ran.lines(forward)) and not named, hint
    )

    left = [found for found in ran.mismatches() if "variable text" in found.message and "on cpu" in found.message]
    outputs = ran["outputs"]
    hint = "the batches are on the CPU: text = text.to(device), inside the loop and before the model gets them"
    if ran.discarded("to"):
        hint = f"`{ran.discarded('to')[0]}` changes nothing: .to returns a copy. Keep it: text = text.to(device)"
    elif not outputs:
        hint = "no batch came out of the model: keep the loop and its outputs"
    yield CheckVerdict("every batch is moved to the device", ran.error is None and not left and bool(outputs), hint)
