"""Operations that only a GPU has: the shapes of their results where PyTorch tells none, and those to be left whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# On a GPU each of these is one kernel; elsewhere PyTorch makes them of several operations, which save more.
WHOLE = ("_fused_rms_norm", "silu_backward", "mish_backward")


@contextmanager
def left_whole() -> Iterator[None]:
    """Let PyTorch believe that there is a GPU's kernel for `WHOLE`, so that it takes none of them apart."""
    missing = [name for name in WHOLE if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")]
    kernels = torch.library.Library("aten", "IMPL")
    try:
        for name in missing:
            kernels.impl(name, _nothing_computes, "CUDA")
        yield
    finally:
        kernels._destroy()


def _nothing_computes(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("there is no GPU here: its operations are told, not computed")


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
