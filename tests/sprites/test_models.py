"""The networks: shapes, and crisp output by construction."""

import pytest
import torch
from torch import nn

from hotloop.apps.sprites.dataset import SIDE
from hotloop.apps.sprites.models import MASK, TOKENS, Classifier, Drawer, Size


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_the_classifier_scores_every_class(dtype: torch.dtype) -> None:
    model = Classifier(Size(classes=5, width=4))
    assert model(torch.zeros(3, SIDE, SIDE, dtype=dtype)).shape == (3, 5)


def test_the_drawer_scores_every_colour_of_every_pixel() -> None:
    model = Drawer(Size(classes=5, width=4))
    blank = torch.full((2, SIDE, SIDE), MASK)
    assert model(blank, torch.tensor([0, 5])).shape == (2, TOKENS, SIDE, SIDE)


def test_the_class_matters_to_the_drawer_once_it_has_learned() -> None:
    torch.manual_seed(0)
    model = Drawer(Size(classes=2, width=4))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    blank, target = torch.full((2, SIDE, SIDE), MASK), torch.stack([torch.full((SIDE, SIDE), k) for k in (3, 9)])
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(blank, torch.tensor([0, 1])), target).backward()
        optimizer.step()
    assert torch.equal(model(blank, torch.tensor([0, 1])).argmax(1), target)
