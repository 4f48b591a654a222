"""Runs the file on a GPU: its peak must be that of one batch, and the mean that of all."""

import ast
from collections.abc import Iterator

import torch
from torch import nn

from hotloop.apps.learn.judging import CheckVerdict, Ran
from hotloop.printing.text import size

ON = ("gpu",)
MOST = 60 << 20  # bytes


def check(ran: Ran) -> Iterator[CheckVerdict]:
    total = ran["total"]
    held = isinstance(total, torch.Tensor) and total.grad_fn is not None
    hint = "`total` remembers how it was computed, and so holds every batch: total + loss.detach(), or no_grad"
    if held and any(isinstance(node, ast.Delete) for node in ast.walk(ran.tree)):
        hint = "`del` drops a name, but `total` still holds the graph of every loss: add loss.detach()"
    elif held and ran.calls("empty_cache"):
        hint = "empty_cache gives back only what nobody holds, and `total` holds all of it: add loss.detach()"
    elif held and (ran.calls("cpu") or ran.calls("clone")):
        hint = "a copy on the CPU still remembers its graph: .detach() cuts it"
    yield CheckVerdict("no batch is kept", not held, hint)
    yield CheckVerdict(
        "the loop does not empty PyTorch's cache",
        not any(ran.in_loops(call.lineno) for call in ran.calls("empty_cache")),
        "empty_cache in the loop makes PyTorch ask the driver for the same memory again and again: leave it out",
    )
    mean = float(torch.as_tensor(ran["mean"]).detach().cpu())
    expected = mean_of(ran)
    yield CheckVerdict(
        "`mean` is the mean of all 20 losses",
        abs(mean - expected) < 1e-3 * abs(expected),
        f"it is {mean:.3f}, and the mean of all 20 is {expected:.3f}: go through all batches and divide by 20",
    )
    yield CheckVerdict(
        "there are still 20 batches", len(ran["batches"]) == 20, f"there are {len(ran['batches'])}: all of them count"
    )
    assert ran.seen is not None
    yield CheckVerdict(
        "memory does not grow from batch to batch",
        ran.seen.peak < MOST,
        f"the peak was {size(ran.seen.peak)}, since every batch leaves something behind",
    )


def mean_of(ran: Ran) -> float:
    """The right mean, from the model and the batches themselves."""
    with torch.no_grad():
        losses = [nn.functional.mse_loss(ran["model"](x), x.sum(1, keepdim=True)) for x in ran["batches"]]
    return float(torch.stack(losses).mean().cpu())
