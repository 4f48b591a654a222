"""GPT-2 of Hugging Face by hand: bf16, forward and loss compiled together, fused AdamW, texts on the GPU, a CUDA graph.

Batches are small and the model's own Python is long, so a graph is worth its memory here.
"""

import torch
from steps import Run, captured_step, over, set_up, step_of
from torch import Tensor

from harness.workloads import TrainingParts


def expert(parts: TrainingParts, device: torch.device) -> Run:
    on_gpu = set_up(device)
    model = parts.model.to(device).train()
    optimizer = parts.optimize(model.parameters(), fused=True, capturable=on_gpu)
    texts = parts.loader.dataset.texts.to(device)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            return model(input_ids=x, labels=x, use_cache=False).loss

    def loss_by(forward: object) -> object:
        return lambda index: forward(texts.index_select(0, index))

    items, batch = len(texts), parts.loader.batch_size
    step = tail = step_of(loss_by(forward), optimizer)
    if on_gpu:
        compiled = torch.compile(forward, dynamic=False)
        step = captured_step(step_of(loss_by(compiled), optimizer), batch, device)
    return over(items, batch, step, tail, device)
