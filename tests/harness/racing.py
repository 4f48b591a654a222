"""What the tests of the benchmark share."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from harness.workloads import TrainingParts, Workload

EXPERTS = Path(__file__).resolve().parents[2] / "benchmarks" / "expert"
CPU = torch.device("cpu")
PACKAGES = {
    "accelerate": "accelerate",
    "fabric": "lightning",
    "lightning": "lightning",
    "trainer": "accelerate",
    "gpt2": "transformers",
    "llama": "transformers",
    "bert": "transformers",
    "unseen-vit": "transformers",
    "unseen-t5": "transformers",
    "unseen-shufflenet": "torchvision",
}


def needs_packages_of(name: str) -> None:
    """Skip where what a contestant or a workload needs is not installed."""
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])


def loss_of(work: Workload, parts: TrainingParts) -> float:
    """The mean loss over the data as the model stands, with the same draws each time."""
    torch.manual_seed(7)
    with torch.no_grad():
        loader = DataLoader(work.dataset, work.batch, drop_last=True, collate_fn=work.collate)
        losses = [objective(parts.model, batch) for batch in loader for objective, _ in parts.updates]
    return float(torch.stack(losses).mean())
