"""Objectives: criterion, function or the model's own loss, made uniform."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.errors import BadArgument, BatchError
from hotloop.objective.objectives import as_objective, losses_of, uniform

MODEL = nn.Identity()
BATCH = (torch.ones(4, 2), torch.zeros(4, 2))


@pytest.mark.parametrize("returned", [None, 3.0, torch.ones(2), {}, {"a": "text"}], ids=str)
def test_what_is_no_loss_is_refused(returned: Any) -> None:
    with pytest.raises(BadArgument, match="one number"):
        losses_of(lambda model, batch: returned, MODEL, BATCH)


class WithoutTargets(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=None, logits=input_ids)


def test_a_model_that_is_given_no_labels_says_what_the_batch_has() -> None:
    with pytest.raises(BadArgument, match=r"returned no loss: .* has input_ids\n.*\"labels\""):
        losses_of(as_objective(None, None), WithoutTargets(), {"input_ids": torch.ones(2)})


POINTWISE = [nn.MSELoss(), nn.L1Loss(), nn.HuberLoss(), nn.SmoothL1Loss()]


@pytest.mark.parametrize("loss", POINTWISE, ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize(
    ("output", "target", "fix"),
    [
        ((8, 1), (8,), r"output.squeeze\(-1\)"),
        ((8,), (8, 1), r"target.squeeze\(-1\)"),
        ((8, 1, 5, 6), (8, 5, 6), r"output.squeeze\(-3\)"),
    ],
)
def test_each_output_with_every_target_is_refused(loss: Any, output: Any, target: Any, fix: str) -> None:
    batch = (torch.zeros(output), torch.zeros(target))
    words = rf"output of shape .*{output[-1]}.* and a target of shape .*{target[-1]}(?s:.*){fix}"
    with pytest.raises(BatchError, match=words):
        losses_of(as_objective(loss, None), MODEL, batch)
    with pytest.raises(BatchError, match=fix):
        hotloop.evaluate(MODEL, [batch], loss=loss)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("output", "target"),
    [
        ((8, 1), (8, 1)),
        ((8, 1), ()),
        ((8, 3), (3,)),
        ((8, 1), (1,)),
        ((1, 1), (1,)),
        ((8, 1, 2), (1, 5, 2)),
        ((8,), ()),
    ],
)
def test_what_is_meant_to_be_broadcast_is(output: Any, target: Any) -> None:
    batch = (torch.ones(output), torch.zeros(target))
    assert losses_of(as_objective(nn.MSELoss(), None), MODEL, batch).total.item() == 1


def test_a_sum_beside_its_parts_is_refused() -> None:
    """All of them are added up, so that the gradient would be twice that of the loss."""
    part = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(BadArgument, match="returned 'loss' beside ce, kl, and all of them are added up"):
        uniform({"loss": part + part, "ce": part, "kl": part}, [torch.ones(2)])
    assert uniform({"ce": part, "kl": part}, [torch.ones(2)]).total.item() == 4
    assert uniform({"loss": part, "shown": part.detach()}, [torch.ones(2)]).total.item() == 4


@pytest.mark.parametrize("learns", [True, False])
def test_the_loss_of_one_item_is_told_from_its_output(learns: bool) -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            output = super().forward(x)
            return nn.functional.mse_loss(output, y), output

    model, batch = Own(3, 1), (torch.ones(1, 3), torch.ones(1, 1))
    with torch.set_grad_enabled(learns):
        loss = losses_of(as_objective(None, None), model, batch).total
        assert torch.equal(loss, model(*batch)[0])
