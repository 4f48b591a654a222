"""A training in which something goes wrong on one rank: `failing.py SCENE [RANK [STEP]]`.

The rank does what the scene says, at that step.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from scenes import GLOBAL, RANK, RANKS, network, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hotloop
from hotloop.ranks import heartbeat

heartbeat.PERIOD = 0.5  # what takes rounds of words takes as many, and less time
scene, *rest = sys.argv[1:]
wrong = int(rest[0]) if rest else RANKS - 1
step = int(rest[1]) if len(rest) > 1 else 5
steps = 0
updates: list[None] = []
IS_WRONG = wrong == RANK


def goes_wrong(kind: str) -> bool:
    return scene == kind and (RANK, steps) == (wrong, step)


class Rows(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        while goes_wrong("endless"):
            time.sleep(0.01)
        return super().__getitem__(index)


class Pieces(IterableDataset[Any]):
    """Batches without a length, of which one rank has more."""

    is_sharded = True

    def __iter__(self) -> Iterator[Any]:
        x, y = rows().tensors
        yield from list(zip(x.split(8), y.split(8), strict=True))[: 6 if IS_WRONG else 4]


class Known(Pieces):
    def __len__(self) -> int:
        return 6 if IS_WRONG else 4


def wait_for_words() -> None:
    """Until this rank has told the others of the step that it is in, and they have heard it: the first rank takes the
    store with it, and they read it once in a period."""
    time.sleep(4 * heartbeat.PERIOD)


def memory_ends(kind: str, items: int) -> None:
    """On one rank memory is too small for more than 4 items at once, from a step on."""
    if scene == kind and IS_WRONG and len(updates) >= step and items > 4:
        raise torch.OutOfMemoryError(f"{items} items do not fit")


class Spiked(torch.autograd.Function):
    """Needs memory in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        memory_ends("sent" if gradient.shape[1] == 6 else "backward", len(gradient))
        return gradient


def objective(model: nn.Module, batch: Any) -> Tensor:
    global steps  # noqa: PLW0603
    if model.training:
        steps += 1
        if goes_wrong("killed"):
            wait_for_words()
            os.kill(os.getpid(), signal.SIGKILL)
        if goes_wrong("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if goes_wrong("raised"):
            raise KeyError("no such row")
    x = Spiked.apply(batch[0].requires_grad_()) if scene == "sent" else batch[0]
    memory_ends("forward", len(x))
    return nn.functional.cross_entropy(Spiked.apply(model(x)), batch[1])


torch.manual_seed(3)
first = [nn.Linear(6, 6), nn.Tanh()] if scene == "model" and IS_WRONG else []
model = nn.Sequential(*first, network())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
optimizer.register_step_post_hook(lambda *_: updates.append(None))
loop = hotloop.Loop(
    model,
    optimizer,
    objective=objective,
    device="cpu",
    plan="plain",
    accumulate=2 if scene == "plan" and IS_WRONG else 1,
)
data: Any = DataLoader(Rows(*rows(items=131 if "uneven" in rest else 128).tensors), GLOBAL // RANKS)
if scene in ("uneven", "unequal"):
    data = DataLoader(Pieces() if scene == "uneven" else Known(), batch_size=None)
if scene == "apart":  # as a person does who wants one rank to evaluate
    for batch in loop.batches(data):
        loop.step(batch)
        if loop.steps == step and IS_WRONG:
            time.sleep(0.5)
            print(loop.evaluate(data))
else:
    loop.fit(data, epochs=3, progress=False, monitor=False)
print("ended", loop.steps, loop.out_of_memory)
torch.save(model.state_dict(), f"{scene} {RANK}.pt")
