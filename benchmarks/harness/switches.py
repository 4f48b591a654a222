"""Torch's global switches: what one contestant sets must not speed up another."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Self

import torch


@dataclass(frozen=True)
class Switches:
    """The settings of the whole process that change how fast or how exactly torch computes."""

    matmul: str  # precision of matmuls in fp32
    cudnn_tf32: bool
    cudnn_benchmark: bool

    @classmethod
    def now(cls) -> Self:
        cudnn = torch.backends.cudnn
        return cls(torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark)

    def set(self) -> None:
        now = Switches.now()
        if now.matmul != self.matmul:  # torch warns of some of these calls, so only where there is a need
            torch.set_float32_matmul_precision(self.matmul)
        if now.cudnn_tf32 != self.cudnn_tf32:
            torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
        torch.backends.cudnn.benchmark = self.cudnn_benchmark


@dataclass
class OwnSwitches:
    """One contestant's settings, which hold only while it has its turn.

    >>> own = OwnSwitches(torch.device("cpu"))
    >>> with own.turn():
    ...     torch.set_float32_matmul_precision("high")
    >>> torch.get_float32_matmul_precision(), own.mine.matmul
    ('highest', 'high')
    """

    device: torch.device
    mine: Switches = field(default_factory=Switches.now)

    @contextmanager
    def turn(self) -> Iterator[None]:
        before = Switches.now()
        self.mine.set()
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                yield
        finally:
            self.mine = Switches.now()
            before.set()
