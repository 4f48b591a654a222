"""Metrics of torchmetrics: it takes seconds to import, so that only the tests that need them do."""

import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall, MulticlassROC

__all__ = ["Kept", "MetricCollection", "MulticlassAccuracy", "MulticlassROC", "MulticlassRecall", "Right"]


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.argmax(1) == target


class Right(Metric):
    """A metric of torchmetrics whose update does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("right", torch.zeros(()))
        self.add_state("seen", torch.zeros(()))

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.right += accuracy(output, target).sum()
        self.seen += len(target)

    def compute(self) -> torch.Tensor:
        return self.right / self.seen


class Kept(Metric):
    """Keeps every prediction, as metrics of ranks do, and runs out of memory in the middle of an update."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.left = iter(range(fails - 1, -1, -1))  # updates until memory runs out
        self.add_state("right", torch.zeros((), dtype=torch.long))
        self.add_state("outputs", [])
        self.add_state("targets", [])

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.outputs.append(output)
        self.right += accuracy(output, target).sum()
        if next(self.left, None) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.targets.append(target)

    def compute(self) -> dict[str, torch.Tensor]:
        assert len(self.outputs) == len(self.targets)
        return {"right": self.right, "seen": torch.tensor(sum(map(len, self.targets)))}
