"""Networks for images by hand: images on the GPU with their channels together, in bf16, compiled, in CUDA graphs."""

import torch
from steps import Run, captured_step, over, set_up, step_of
from torch import Tensor

from harness.workloads import TrainingParts


def train_images(parts: TrainingParts, device: torch.device, **switches: bool) -> Run:
    on_gpu = set_up(device)
    model = parts.model.to(device, memory_format=torch.channels_last).train()
    optimizer = parts.optimize(model.parameters(), fused=True, **switches)
    images, labels = (tensor.to(device) for tensor in parts.loader.dataset.tensors)
    images = images.permute(0, 2, 3, 1).contiguous()  # a picture is one piece of memory, its channels together
    if on_gpu:
        images = images.bfloat16()  # what autocast would do to every batch

    def forward(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            return parts.loss(model(x), y)

    def loss_by(forward: object) -> object:
        return lambda index: forward(images.index_select(0, index).permute(0, 3, 1, 2), labels.index_select(0, index))

    items, batch = len(labels), parts.loader.batch_size
    step = tail = step_of(loss_by(forward), optimizer)
    if on_gpu:
        compiled = torch.compile(forward, dynamic=False)
        step = captured_step(step_of(loss_by(compiled), optimizer), batch, device)
        if items % batch:  # one step of an epoch is not worth another compilation
            tail = captured_step(tail, items % batch, device)
    return over(items, batch, step, tail, device)
