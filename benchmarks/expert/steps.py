"""What the hand-tuned loops share: epochs over data that lives on the device, and steps as CUDA graphs.

Nothing here or beside it uses hotloop to train. A loop is tuned for one workload and checked by eye, as experts do.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

WARM_UP = 4  # steps before a capture: kernels are compiled and chosen, the optimizer's state is made

Step = Callable[[Tensor], None]  # trains on the items that have these numbers
Run = Callable[[int], float]  # trains so many epochs; the seconds


def set_up(device: torch.device) -> bool:
    """Turn on what costs nothing on a GPU; whether it is one."""
    if device.type != "cuda":
        return False
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = (
        False  # nothing is left in fp32; others' choices of algorithms are kept apart by it
    )
    torch.set_float32_matmul_precision("high")  # TF32 for what is left in fp32
    return True


def step_of(loss_of: Callable[[Tensor], Tensor], optimizer: Optimizer) -> Step:
    """Forward, backward, update. The gradients are let go of, so that in a graph they share the activations' memory."""

    def step(index: Tensor) -> None:
        loss_of(index).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def warm_up(call: Callable[[], None]) -> None:
    """Run on a side stream first: a capture must not be the first to use anything."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


class Captured:
    """A call as a CUDA graph: all of its kernels in one launch."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call  # held, because the graph reads the memory of what it holds
        warm_up(call)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            call()

    def __call__(self) -> None:
        self._graph.replay()


def captured_step(step: Step, size: int, device: torch.device) -> Step:
    """A step of `size` items as a CUDA graph, which reads their numbers from one place."""
    index = torch.arange(size, device=device)
    replay = Captured(lambda: step(index))

    def again(numbers: Tensor) -> None:
        index.copy_(numbers)
        replay()

    return again


def over(items: int, batch: int, step: Step, tail: Step, device: torch.device) -> Run:
    """Epochs over all items, each in a new order that the device draws; the last, smaller batch has its own step."""
    whole = items - items % batch

    def epoch() -> None:
        order = torch.randperm(items, device=device)
        for index in order[:whole].split(batch):
            step(index)
        if whole < items:
            tail(order[whole:])

    return timed(epoch, device)


def timed(epoch: Callable[[], None], device: torch.device) -> Run:
    """So many epochs, between two readings of the clock."""

    def run(epochs: int) -> float:
        _finish(device)
        start = time.perf_counter()
        for _ in range(epochs):
            epoch()
        _finish(device)
        return time.perf_counter() - start

    return run


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
