"""A training in which one rank, the last unless it is said, does something else: `failing.py SCENE [RANK [STEP]]`.

It is set up as the scene says, or does what it says at that step.
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

# Seconds; as many rounds of words as ever, in less time.
heartbeat.PERIOD, heartbeat.BEAT_PATIENCE, heartbeat.LATE = 0.25, 1.5, 1.0
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


def drift(record: Any) -> None:
    """Weights are written on one rank alone: by rounding, or by more."""
    if IS_WRONG and record.step == 3:
        with torch.no_grad():
            next(iter(model.parameters())).mul_(1 + 1e-6 if scene == "rounds" else 1.5)


def differs(kind: str) -> bool:
    return scene == kind and IS_WRONG


torch.manual_seed(3)
layers = [nn.Linear(6, 6), nn.Tanh()] if differs("model") else []
layers += [nn.Dropout(0.2 if IS_WRONG else 0.1)] if scene == "dropout" else []
model = nn.Sequential(*layers, network())
optimizer = torch.optim.SGD(model.parameters(), 0.2 if differs("rate") else 0.1)
optimizer.register_step_post_hook(lambda *_: updates.append(None))
criterion = {"loss": nn.MultiMarginLoss() if IS_WRONG else nn.CrossEntropyLoss()}.get(scene)
loop = hotloop.Loop(
    model,
    optimizer,
    criterion,
    objective=None if criterion else objective,
    device="cpu",
    plan="plain",
    accumulate=2 if differs("plan") else 1,
)
data: Any = DataLoader(Rows(*rows(items=131 if "uneven" in rest else 128).tensors), GLOBAL // RANKS)
if scene in ("uneven", "unequal"):
    data = DataLoader(Pieces() if scene == "uneven" else Known(), batch_size=None)
if scene in ("apart", "loop"):  # as a person does who wants one rank to evaluate, or to change weights
    for _ in range(2):
        for batch in loop.batches(data):
            loop.step(batch)
            if loop.steps == step and differs("apart"):
                time.sleep(0.5)
                print(loop.evaluate(data))
            if loop.steps == step and differs("loop"):
                model[0][0].weight.data.mul_(1.5)
else:
    options: dict[str, Any] = {"save": "saved", "every": "4 steps"} if scene == "saves" else {}
    options["on_step"] = drift if scene in ("writes", "saves", "rounds") else None
    loop.fit(data, epochs=3, progress=False, monitor=False, **options)
print("ended", loop.steps, loop.out_of_memory)
torch.save(model.state_dict(), f"{scene} {RANK}.pt")
