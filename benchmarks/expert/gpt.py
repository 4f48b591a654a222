"""GPT by hand: bf16, forward and loss compiled together, fused AdamW, tokens on the GPU.

A step is tens of milliseconds of arithmetic, which hides every launch: a graph would only take memory.
"""

import torch
from steps import Run, over, set_up, step_of
from torch import Tensor

from harness.workloads import TrainingParts


def expert(parts: TrainingParts, device: torch.device) -> Run:
    on_gpu = set_up(device)
    model = parts.model.to(device).train()
    optimizer = parts.optimize(model.parameters(), fused=True)
    inputs, targets = (tensor.to(device) for tensor in parts.loader.dataset.tensors)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            return parts.objective(model, (x, y))

    def loss_by(forward: object) -> object:
        return lambda index: forward(inputs.index_select(0, index), targets.index_select(0, index))

    plain = step_of(loss_by(forward), optimizer)
    step = step_of(loss_by(torch.compile(forward, dynamic=False)), optimizer) if on_gpu else plain
    return over(len(inputs), parts.loader.batch_size, step, plain, device)
