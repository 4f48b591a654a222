"""The drawer of sprites by hand: sprites on the GPU, the whole objective in bf16 and compiled, in CUDA graphs.

The network already keeps its channels together. The random masks are drawn inside the graph, anew at every replay.
"""

import torch
from steps import Run, captured_step, over, set_up, step_of
from torch import Tensor

from harness.workloads import TrainingParts


def expert(parts: TrainingParts, device: torch.device) -> Run:
    on_gpu = set_up(device)
    model = parts.model.to(device).train()
    optimizer = parts.optimize(model.parameters(), fused=True, capturable=on_gpu)
    pixels, labels = (tensor.to(device) for tensor in parts.loader.dataset.tensors)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            return parts.objective(model, (x, y))

    def loss_by(forward: object) -> object:
        return lambda index: forward(pixels.index_select(0, index), labels.index_select(0, index))

    items, batch = len(labels), parts.loader.batch_size
    step = tail = step_of(loss_by(forward), optimizer)
    if on_gpu:
        compiled = torch.compile(forward, dynamic=False)
        step = captured_step(step_of(loss_by(compiled), optimizer), batch, device)
        if items % batch:
            tail = captured_step(tail, items % batch, device)
    return over(items, batch, step, tail, device)
