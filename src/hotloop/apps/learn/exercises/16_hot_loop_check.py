"""Runs the file on a GPU: its loop must copy nothing and wait for nothing, and still train."""

from collections.abc import Iterator

import torch

from hotloop.apps.learn.judging import CheckVerdict, Ran

ON = ("gpu",)


def check(ran: Ran) -> Iterator[CheckVerdict]:
    losses = ran["losses"]
    yield CheckVerdict(
        "`losses` has the loss of each of 12 steps", len(losses) == 12, f"it has {len(losses)}: 3 epochs of 4 batches"
    )
    told = [float(torch.as_tensor(loss).detach().cpu()) for loss in losses]
    learned = len(told) == 12 and sum(told[-4:]) < 0.97 * sum(told[:4])
    yield CheckVerdict(
        "it still learns",
        learned,
        "the loss does not fall: zero_grad, backward and step belong into every step",
    )
    steps = [copy for copy in ran.copies() if copy.count >= 4]
    line = steps[0].line if steps else 0
    hint = (
        f"line {line} copies in every step: put inputs and targets on the device before the loop, and index them there"
    )
    if steps and all(copy.pinned and not copy.blocking for copy in steps):
        hint = f"line {line}: pinned copies do not block, but the data is small: on the device there is no copy at all"
    yield CheckVerdict("the loop copies nothing", not steps, hint)
    waits = [wait for wait in ran.waits() if wait.count >= 4]
    line = waits[0].line if waits else 0
    yield CheckVerdict(
        "the loop waits for nothing",
        not waits,
        f"line {line} makes the CPU wait in every step: keep loss.detach(), and read the numbers after the loop",
    )
    graphs = [loss for loss in losses if isinstance(loss, torch.Tensor) and loss.grad_fn is not None]
    yield CheckVerdict(
        "no loss keeps its graph", not graphs, "the losses keep their graphs in memory: append loss.detach()"
    )
