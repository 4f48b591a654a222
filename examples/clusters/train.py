"""A training that goes on after it was ended: what the Slurm, Kubernetes and Ray files of this folder run.

python train.py                              # one process
hotloop launch train.py                      # one process for each GPU
hotloop launch --processes 2 train.py        # two processes on the CPU
"""

import argparse
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop

INTERRUPTED = 130  # ended before it was done: `hotloop launch` hands this exit code on


def train(save: str = "runs/a", epochs: int = 10, items: int = 65_536) -> hotloop.Report:
    """Nothing here says how many GPUs there are, or on which machines."""
    generator = torch.Generator().manual_seed(0)  # the same data in every process; each rank trains on its share
    x = torch.randn(items, 64, generator=generator)
    loader = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=256, shuffle=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    loop = hotloop.Loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3), nn.CrossEntropyLoss())
    return loop.fit(loader, epochs=epochs, save=save, every="5min", resume=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", default="runs/a", help="a folder that every node sees")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--items", type=int, default=65_536)
    report = train(**vars(parser.parse_args()))
    sys.exit(INTERRUPTED if report.interrupted else 0)


if __name__ == "__main__":
    main()
