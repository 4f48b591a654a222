"""Operations that are one kernel on a GPU are one here, with the memory that it keeps."""

from collections.abc import Callable
from typing import Any

import torch

from hotloop.apps.simulate.cards import card
from hotloop.apps.simulate.families import WHOLE, left_whole
from hotloop.apps.simulate.operations import facts

MIB = 2**20
SCRIPT = """
import torch

x = torch.ones(1024, 1024, device="cuda", requires_grad=True)
norm = torch.nn.RMSNorm(1024).to("cuda")
before = torch.cuda.memory_allocated()
y = norm(x)
print(torch.cuda.memory_allocated() - before)
z = torch.nn.functional.silu(x)
gradient = torch.ones_like(z)
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
torch.autograd.grad(z, x, gradient)
print(torch.cuda.max_memory_allocated() - before)
"""


def _has_kernels() -> list[bool]:
    return [torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA") for name in WHOLE]


def test_kernels_are_believed_in_for_a_while() -> None:
    before = _has_kernels()
    with left_whole():
        assert _has_kernels() == [True] * len(WHOLE)
        x = torch.ones(4, requires_grad=True)
        torch.nn.functional.silu(x).sum().backward()  # on the host all is as it was
    assert _has_kernels() == before


def test_they_are_not_taken_apart() -> None:
    for name in WHOLE:
        assert not facts(getattr(torch.ops.aten, name).default).composite


def test_a_norm_keeps_its_result_and_a_number_for_each_row(run: Callable[..., Any]) -> None:
    ran = run(SCRIPT, card=card("h200"))
    kept, most = map(int, ran.out.split())
    assert 4 * MIB < kept <= 4 * MIB + 4096
    assert most == 4 * MIB  # the gradient and nothing beside
