"""Operations and bytes are those that one can work out by hand."""

import torch
import torch.nn.functional as F

from harness.counting import Count, count_of, counted
from harness.workloads import workload

from .racing import CPU


def test_a_linear_layer_multiplies_and_adds_for_each_weight_and_row() -> None:
    layer, x = torch.nn.Linear(16, 8), torch.ones(32, 16, requires_grad=True)
    assert counted(lambda: layer(x)).flops == 2 * 32 * 16 * 8
    assert counted(lambda: layer(x).sum().backward()).flops == 3 * 2 * 32 * 16 * 8  # and twice that backwards


def test_attention_on_a_cpu_counts() -> None:
    q = torch.zeros(2, 3, 8, 4, requires_grad=True)
    products = 2 * 2 * 3 * 8 * 8 * 4
    assert counted(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)).flops == 2 * products


def test_bytes_are_read_and_written_once() -> None:
    x = torch.ones(100)
    assert counted(lambda: x + x) == Count(0, 3 * 400)
    assert counted(lambda: x.add_(1)) == Count(0, 2 * 400)
    assert counted(lambda: x.view(10, 10).t()) == Count(0, 0)
    assert counted(lambda: torch.empty(100)) == Count(0, 0)
    assert counted(lambda: torch._foreach_add_([x, x], 1)) == Count(0, 4 * 400)


def test_what_is_repeated_lies_in_memory_once() -> None:
    row = torch.ones(1, 10).expand(50, 10)
    assert counted(row.clone).traffic == 40 + 50 * 40


def test_of_a_table_only_what_is_picked_is_read() -> None:
    table, index = torch.zeros(1000, 4), torch.tensor([1, 2])
    assert counted(lambda: F.embedding(index, table)).traffic == index.nbytes + 2 * 2 * 16
    assert counted(lambda: table[index]).traffic == index.nbytes + 2 * 2 * 16


def test_a_unit_of_the_mlp() -> None:
    count = count_of(workload("mlp", "cpu", quick=True), CPU)
    first, second = 2 * 16 * 64, 2 * 64
    assert count.flops == 2 * first + 3 * second  # nobody asks for the gradient of the rows
    assert count.traffic > 2 * 4 * (16 + 64 + 64 + 1)
