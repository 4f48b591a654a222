"""What the tests of the benchmark share."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader

from hotloop.bench.workloads import TrainingParts, Workload

EXPERTS = Path(__file__).resolve().parents[2] / "benchmarks" / "expert"
CPU = torch.device("cpu")


def loss_of(work: Workload, parts: TrainingParts) -> float:
    """The mean loss over the data as the model stands, with the same draws each time."""
    torch.manual_seed(7)
    with torch.no_grad():
        losses = [parts.compute(parts.model, batch) for batch in DataLoader(work.dataset, work.batch, drop_last=True)]
    return float(torch.stack(losses).mean())
