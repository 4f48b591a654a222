"""`Work`: the arithmetic of a pass."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from hotloop.step.arithmetic import Work


def arithmetic(model: nn.Module, *inputs: object) -> float:
    with Work() as work:
        output = model(*inputs)
        output = output if isinstance(output, torch.Tensor) else output[1]
        (output[0] if isinstance(output, tuple) else output).sum().backward()
    return work.flops


def test_a_linear_layer() -> None:
    x = torch.randn(10, 8, requires_grad=True)
    assert arithmetic(nn.Linear(8, 4), x) == 3 * 2 * 10 * 8 * 4


def test_operations_are_counted() -> None:
    with Work() as work:
        (torch.ones(3) + 1).sum()
    assert work.operations == 3


def test_a_cell_is_counted_by_its_matmuls() -> None:
    x = torch.randn(10, 8)
    cell = nn.LSTMCell(8, 4)
    with Work() as work:
        cell(x)
    assert work.flops == 2 * 10 * (8 + 4) * 16


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_on_a_gpu_a_recurrence_over_packed_sequences_counts_as_over_others(kind: type[nn.Module]) -> None:
    layer = kind(8, 16, num_layers=2, batch_first=True).cuda()
    x = torch.randn(5, 7, 8, device="cuda")
    packed = pack_padded_sequence(x, torch.full((5,), 7), batch_first=True)
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    matrices = gates * (16 * 8 + 3 * 16 * 16)
    assert arithmetic(layer, x) == arithmetic(layer, packed) == 3 * 2 * 35 * matrices
