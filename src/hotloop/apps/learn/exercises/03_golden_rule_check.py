"""Runs the file on a GPU: model, batches and what the model makes itself must be there."""

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import nn

from hotloop.apps.learn.judging import CheckVerdict, Ran

ON = ("gpu",)


def check(ran: Ran) -> Iterator[CheckVerdict]:
    yield CheckVerdict(
        "the model is on the GPU",
        next(ran["model"].parameters()).device.type == "cuda",
        "everything agrees now because the model is on the CPU: leave it on `device`, and move the rest to it",
    )

    forward = ran.function("forward")
    source = ran.text(forward)
    hint = "torch.arange makes its numbers on the CPU; give it the device of the input: device=text.device"
    named = any(word in source for word in ('"cuda', "'cuda", ".cuda("))
    if named:
        hint = 'a fixed "cuda" in forward breaks the file on machines without a GPU: write device=text.device'
    agrees = not named and not _makes_strays(ran["model"])
    yield CheckVerdict("what `forward` makes is where its input is", agrees, hint)

    left = [found for found in ran.mismatches() if "variable text" in found.message and "on cpu" in found.message]
    outputs = ran["outputs"]
    hint = "the batches are on the CPU: text = text.to(device), inside the loop and before the model gets them"
    if ran.discarded("to"):
        hint = f"`{ran.discarded('to')[0]}` changes nothing: .to returns a copy. Keep it: text = text.to(device)"
    elif not outputs:
        hint = "no batch came out of the model: keep the loop and its outputs"
    yield CheckVerdict("every batch is moved to the device", ran.error is None and not left and bool(outputs), hint)


def _makes_strays(model: nn.Module) -> bool:
    """Whether a layer is given what is not on the model's device, though the text is there."""
    there, strays = next(model.parameters()).device, []

    def note(_: nn.Module, inputs: tuple[object, ...]) -> None:
        strays.extend(each for each in inputs if isinstance(each, torch.Tensor) and each.device.type != there.type)

    for layer in model.children():
        layer.register_forward_pre_hook(note)
    with suppress(Exception):  # of which the run itself tells
        model(torch.zeros(1, 10, dtype=torch.long, device=there))
    return bool(strays)
