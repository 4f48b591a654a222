"""Calls `evaluate` with models that tell in which mode they were called and whether gradients were on."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hotloop.apps.learn.judging import CheckVerdict, Ran

ON = ("cpu",)


class Spy(nn.Module):
    """Answers from a table, and notes how it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.modes: list[bool] = []
        self.gradients: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        self.gradients.append(torch.is_grad_enabled())
        return x * self.weight


def check(ran: Ran) -> Iterator[CheckVerdict]:
    evaluate = ran["evaluate"]
    scores = torch.eye(2).repeat(5, 1)[:10]  # which class is answered, alternately
    targets = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 1, 0])  # the last two, alone in their batch, are answered wrong
    spy = Spy()
    told = float(evaluate(spy, DataLoader(TensorDataset(scores, targets), batch_size=4)))

    yield CheckVerdict(
        "the model is in eval mode while it is evaluated",
        bool(spy.modes) and not any(spy.modes),
        "dropout is still active: call model.eval() before the loop; no_grad does not do that",
    )
    yield CheckVerdict(
        "no gradients are recorded",
        bool(spy.gradients) and not any(spy.gradients),
        "model.eval() turns dropout off, not gradients: put the loop under `with torch.inference_mode():`",
    )
    hint = f"for 8 right answers of 10 in batches of 4, 4 and 2 it says {told:.3f}: count right answers and items"
    if abs(told - 2 / 3) < 1e-3:
        hint = "a mean of the batches' means counts the short last batch too much: sum right answers, divide by items"
    yield CheckVerdict("the accuracy is right answers over items", abs(told - 0.8) < 1e-6, hint)

    after = spy.training
    frozen = Spy().eval()
    evaluate(frozen, DataLoader(TensorDataset(scores, targets), batch_size=4))
    hint = "after the evaluation the model stays in eval mode, and training would go on without dropout: model.train()"
    if after and frozen.training:
        hint = "a model that was in eval mode comes back in train mode: note model.training first, and put that back"
    yield CheckVerdict("afterwards the model is in the mode it was in", after and not frozen.training, hint)
