"""Runs the file on a GPU: `mean` must be a buffer, and nothing may be copied in the steps."""

from collections.abc import Iterator

import torch
from torch import nn

from hotloop.apps.learn.judging import CheckVerdict, Ran

ON = ("gpu",)


def check(ran: Ran) -> Iterator[CheckVerdict]:
    model = ran["model"]
    forward = set(ran.lines(ran.function("forward")))
    copied = [copy for copy in ran.copies(loops=False) if copy.line in forward]
    hint = 'give it to PyTorch in __init__: self.register_buffer("mean", torch.full((4,), 0.5))'
    if copied:
        hint = f"line {copied[0].line} copies `mean` in every forward pass: a buffer is moved once, with the model"
    left = any("mean" in found.message for found in ran.mismatches())
    yield CheckVerdict("`mean` is where the model is, without a copy in forward", not left and not copied, hint)

    buffers = dict(model.named_buffers())
    parameter = isinstance(model.mean, nn.Parameter)
    hint = "`mean` is a plain attribute, which PyTorch does not know: self.register_buffer in __init__"
    if parameter:
        hint = "a parameter moves too, but the optimizer trains it: this is a constant, so register_buffer"
    elif model.mean.device.type == "cuda" and "mean" not in buffers:
        hint = "it is moved by hand now, and the next model.to would leave it behind: self.register_buffer in __init__"
    yield CheckVerdict("`mean` is a buffer of the model", "mean" in buffers, hint)
    yield CheckVerdict(
        "`mean` is saved with the model",
        "mean" in model.state_dict(),
        "the state_dict has no `mean`: register it, and not with persistent=False",
    )
    value = model.mean.detach().cpu()
    yield CheckVerdict(
        "`mean` is still 0.5",
        value.shape == (4,) and torch.equal(value, torch.full((4,), 0.5)),
        f"training has changed it to {value.tolist()}: what is not trained is no nn.Parameter",
    )
