"""The small CNN by hand: see images.py. A graph can hold Adam's steps only where their count lives on the GPU."""

import torch
from images import train_images
from steps import Run

from harness.workloads import TrainingParts


def expert(parts: TrainingParts, device: torch.device) -> Run:
    return train_images(parts, device, capturable=device.type == "cuda")
