"""A training in which rank 1 is slow: `slowly.py`, which prints what its report says of the ranks."""

import json
import time

from scenes import RANK, loader, network, rows, trained
from torch import Tensor, nn


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02 if RANK == 1 else 0.0)
        return x


_, report = trained(network(Slow()), nn.CrossEntropyLoss(), loader(rows()), epochs=2)
print(json.dumps(report.to_json()["by_rank"]))
print(str(report).replace("\n", " "))
