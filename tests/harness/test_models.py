"""The networks have the sizes that their names promise."""

import pytest
import torch

from harness.models import GPT, GPTSize, ResNet18, mlp


def weights(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_sizes_are_those_of_the_originals() -> None:
    with torch.device("meta"):
        assert weights(mlp()) == 16 * 64 + 64 + 64 + 1
        assert weights(ResNet18()) == pytest.approx(11.17e6, rel=0.001)
        assert weights(GPT(GPTSize())) == pytest.approx(124e6, rel=0.01)


def test_gpt_sees_nothing_of_what_follows() -> None:
    torch.manual_seed(0)
    model = GPT(GPTSize(layers=2, heads=2, width=16, context=8, vocabulary=32))
    text = torch.randint(0, 32, (1, 8))
    other = text.clone()
    other[0, 5] = (other[0, 5] + 1) % 32
    before, after = model(text), model(other)
    assert before.shape == (1, 8, 32)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])
