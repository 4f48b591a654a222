"""Runs the file on a GPU and compares its losses with those of a right loop."""

from collections.abc import Iterator

import torch
from torch import nn

from hotloop.apps.learn.judging import CheckVerdict, Ran

ON = ("gpu",)


def expected() -> list[float]:
    """The losses of the same loop, written right."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    x = torch.rand(32, 3)
    y = x.sum(1, keepdim=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(10):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check(ran: Ran) -> Iterator[CheckVerdict]:
    losses = ran["losses"]
    yield CheckVerdict(
        "`losses` has the loss of each of 10 steps",
        len(losses) == 10,
        f"it has {len(losses)}: append one in every step",
    )
    told = [float(torch.as_tensor(loss).detach().cpu()) for loss in losses]
    right = len(told) == 10 and torch.allclose(torch.tensor(told), torch.tensor(expected()), atol=1e-3)
    yield CheckVerdict("every step follows its own gradient", right, why_wrong(ran, told))

    waits = ran.waits()
    line = waits[0].line if waits else 0
    yield CheckVerdict(
        "the CPU waits for nothing in the loop",
        not waits,
        f"line {line} brings a number to the CPU in every step: keep loss.detach(), and read it after the loop",
    )
    graphs = [loss for loss in losses if isinstance(loss, torch.Tensor) and loss.grad_fn is not None]
    yield CheckVerdict(
        "no loss keeps its graph",
        not graphs,
        "the losses remember how they were computed, which keeps memory: append loss.detach()",
    )


def why_wrong(ran: Ran, losses: list[float]) -> str:
    cleared = [call.lineno for call in ran.calls("zero_grad")]
    inside = [line for line in cleared if ran.in_loops(line)]
    steps = [call.lineno for call in ran.calls("optimizer.step")]
    backward = [call.lineno for call in ran.calls("backward")]
    if not cleared:
        return "gradients add up from step to step: optimizer.zero_grad() before loss.backward()"
    if not inside:
        return (
            "zero_grad stands before the loop, so that only the first step has its own gradient: put it into the loop"
        )
    if steps and backward and any(backward[0] < line < steps[0] for line in inside):
        return "zero_grad between backward and step deletes the gradients before they are used: put it before backward"
    if losses and losses[-1] == losses[0]:
        return "the loss does not change: is optimizer.step() in the loop?"
    return "the losses are not those of the right loop: zero_grad, forward, backward, step, in this order"
