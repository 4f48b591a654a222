"""What a device can do at most, measured: large matmuls in each precision, and a copy of its memory."""

from functools import partial

import torch

from hotloop.device import pick
from hotloop.device.backend import backend_of
from hotloop.device.clock import measure
from hotloop.levers.tf32 import fp32_matmul
from hotloop.objective.objectives import HALF_PRECISIONS

BYTES = "bytes"  # the name of the memory's speed; the others are precisions


def ceilings(device: torch.device, *, quick: bool = False) -> dict[str, float]:
    """Operations per second in each precision that suits the device, and bytes per second, read and written.

    >>> sorted(ceilings(torch.device("cpu"), quick=True))
    ['bytes', 'fp32']
    """
    is_host = backend_of(device).is_host
    side = 256 if quick else 1024 if is_host else 8192
    repeats = 3 if quick else 10
    limits = {precision: _product(device, precision, side, repeats) for precision in _precisions(device)}
    return {**limits, BYTES: _copy(device, 1 << (20 if quick else 24 if is_host else 28), repeats)}


def _precisions(device: torch.device) -> list[str]:
    half = pick(device).precision
    return ["fp32", *(["tf32"] if half == "bf16" else []), *([half] if half != "fp32" else [])]


def _product(device: torch.device, precision: str, side: int, repeats: int) -> float:
    kind = HALF_PRECISIONS.get(precision, torch.float32)
    a, b = (torch.randn(side, side, device=device, dtype=kind) for _ in range(2))
    with backend_of(device).current(), fp32_matmul("high" if precision == "tf32" else "highest"):
        best = measure(partial(torch.mm, a, b), device=device, repeats=repeats).low
    return 2 * side**3 / best


def _copy(device: torch.device, count: int, repeats: int) -> float:
    source = torch.zeros(count, device=device)  # far more than the caches hold, except where it is quick
    target = torch.empty_like(source)
    best = measure(partial(target.copy_, source), device=device, repeats=repeats).low
    return 2 * source.nbytes / best
