"""The small network by hand: the data on the GPU, and a whole epoch in one CUDA graph.

A step is so short that anything done between two steps takes longer than the steps.
"""

import torch
from steps import Captured, Run, set_up, timed

from harness.workloads import TrainingParts


def expert(parts: TrainingParts, device: torch.device) -> Run:
    on_gpu = set_up(device)
    model = parts.model.to(device).train()
    optimizer = parts.optimize(model.parameters(), fused=True, capturable=on_gpu)
    inputs, targets = (tensor.to(device) for tensor in parts.loader.dataset.tensors)
    batch = parts.loader.batch_size
    order = torch.arange(len(inputs), device=device)

    def epoch() -> None:
        for x, y in zip(inputs[order].split(batch), targets[order].split(batch), strict=True):
            parts.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    train = Captured(epoch) if on_gpu else epoch

    def shuffled() -> None:
        torch.randperm(len(order), out=order)
        train()

    return timed(shuffled, device)
