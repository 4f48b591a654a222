"""Shapes of results for operations that only a GPU has, and of which PyTorch tells no shapes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _gru_cell(gates: Tensor, hidden_gates: Tensor, state: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(state), state.new_empty(state.size(0), 5 * state.size(1))


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    rows, width = grad.size(0), 3 * grad.size(1)
    gates = [grad.new_empty(rows, width) for _ in range(2)]
    biases = [grad.new_empty(width) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad), *biases)


def _lstm_cell_backward(
    grad_h: Tensor | None, grad_c: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    return (
        torch.empty_like(workspace),
        torch.empty_like(cx),
        workspace.new_empty(workspace.size(1)) if has_bias else None,
    )


RULES: dict[str, Callable[..., Any]] = {
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
}
