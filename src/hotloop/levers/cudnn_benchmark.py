"""cuDNN tries the algorithms of each convolution and keeps the fastest."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from hotloop import kernels
from hotloop.levers.base import Delay, Lever, LeverTarget
from hotloop.levers.channels_last import convolutions_of
from hotloop.plan import Plan

EACH = 0.2  # seconds for each convolution of a model, forward and backward, as seen on an H200
CANDIDATES, USUAL = 4, 10  # that cuDNN tries for each shape; PyTorch's default


class CudnnBenchmarkLever(Lever):
    """**What it does.** cuDNN has several algorithms for a convolution. With `torch.backends.cudnn.benchmark` it tries
    them the first time it meets a shape and keeps the fastest; otherwise it uses a heuristic.

    PyTorch caches cuDNN's algorithm per shape for the life of the process, however it was found: for a shape that has
    run once without the switch, there is no search when the switch is turned on later. The cache key includes whether
    TF32 is allowed for convolutions, which changes nothing in bf16 and fp16. There, the lever also turns TF32 off for
    convolutions inside the step, so cuDNN searches for every shape; the few fp32 convolutions of such a model then run
    without TF32. In fp32, or if you have turned TF32 off yourself, it only helps new shapes.

    **The numbers.** Tier B: another algorithm adds in another order. The fastest one may differ from run to run, and so
    may the last bits.

    **What it needs.** A CUDA device and a two-dimensional convolution in the model. If you have set the switch
    yourself, the tuner leaves it alone.

    **What it costs.** 0.1 to 0.2 s for each convolution of the model, and the memory of the largest algorithm tried.
    hotloop tries four candidates for each shape; PyTorch's default of ten takes up to five times as long and was 1.5%
    faster at best. Another number in `torch.backends.cudnn.benchmark_limit` is respected. During training, a run begins
    the search only if hotloop expects it to delay the rest by less than 3%, and not for a vision transformer, whose one
    convolution cuts images into patches.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, loss, plan=hotloop.Plan("cuda", cudnn_benchmark=True))
    ```

    **When it does not help.** If the heuristic was right. If shapes change from batch to batch: cuDNN searches again
    for each new one.
    """

    name = "cudnn benchmark"
    order = 110
    tier = "B"
    what = "cuDNN tries its algorithms for each convolution and keeps the fastest"
    cost = "a moment"
    undo = "the switch is restored after each step"
    needs_cuda = True
    sets = "cudnn_benchmark", True

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if torch.backends.cudnn.benchmark:
            return "it is on already"
        return None if convolutions_of(target.model) else "the model has no two-dimensional convolution"

    def refines(self, model: nn.Module) -> bool:
        return True

    def delay(self, target: LeverTarget, plan: Plan, batch: Any, *, shapes_vary: bool) -> Delay | str:
        if plan.precision == "fp32":
            return "in fp32 the algorithms of the first steps stay"
        if shapes_vary:
            return "each new shape would be searched for"
        seconds = expected_search(target.model)
        return Delay("a search", seconds) if seconds else "its convolutions only cut images into patches"

    def around(self, plan: Plan) -> AbstractContextManager[Any]:
        return _benchmark() if plan.precision == "fp32" else _benchmark_anew()


def expected_search(model: nn.Module) -> float:
    """Seconds that the search may take; 0 where there is nothing worth a search, as in a transformer that begins with
    a convolution of its image's patches."""
    return EACH * sum(not kernels.convolutions.cuts_into_patches(layer) for layer in convolutions_of(model))


@contextmanager
def _benchmark() -> Iterator[None]:
    library: Any = torch.backends.cudnn
    before, limit = library.benchmark, getattr(library, "benchmark_limit", None)  # which a build without CUDA lacks
    library.benchmark = True
    if limit == USUAL:
        library.benchmark_limit = CANDIDATES
    try:
        yield
    finally:
        library.benchmark = before
        if limit == USUAL:
            library.benchmark_limit = limit


@contextmanager
def _benchmark_anew() -> Iterator[None]:
    """The same for convolutions in half precision, also for those that have run before.

    PyTorch caches algorithms by shapes and by whether TF32 is allowed, which says nothing of half precision: without
    TF32, nothing is cached yet. It is never allowed where it was not, since parts of the model may be in fp32.
    """
    library, allowed = torch.backends.cudnn, False
    with suppress(RuntimeError):  # the person has set precisions by the newer names: then the older cannot be read
        allowed = library.allow_tf32
    with _benchmark():
        if allowed:
            library.allow_tf32 = False
        try:
            yield
        finally:
            if allowed:
                library.allow_tf32 = True
