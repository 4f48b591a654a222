"""What single operations take on a GPU beside their results: the measurements of `calibrate_memory.py`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotloop.apps.simulate.convolution_workspaces import Case

aten = torch.ops.aten
PARTS = ("forward", "input", "weight")  # of a convolution
DTYPES = {"tf32": torch.float32, "half": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def taken(call: Callable[[], Any]) -> tuple[int, int, Any]:
    """Bytes that a call had beside what it left, bytes that it left, and its result; as they were asked for."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = call()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    after = stats["requested_bytes.all.current"]
    return stats["requested_bytes.all.peak"] - after, after - before, result


@contextmanager
def conditions(precision: str, benchmark: bool) -> Iterator[None]:
    """cuDNN's settings, put back afterwards."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark
    cudnn.allow_tf32, cudnn.benchmark = precision != "fp32", benchmark
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.benchmark = before


class Task(NamedTuple):
    """A convolution to measure, and how it is run."""

    case: Case
    precision: str
    last: bool
    benchmark: bool = False

    def what(self, part: str) -> str:
        """The name of a measurement; at first, kernels of an even size were measured with more padding."""
        padded = "" if self.case.kernel % 2 or not self.padding else f" padding {self.padding}"
        sizes = tuple(self.case) if self.case.dilation > 1 else tuple(self.case)[:-1]
        return f"convolution {part} {self.precision} {'last' if self.last else 'first'} {sizes}{padded}"

    @property
    def padding(self) -> int:
        case = self.case
        return case.dilation * (int(case.kernel) - 1) // 2 if case.kernel != case.stride else 0


def attempted(task: Task) -> tuple[list[dict[str, Any]], str | None]:
    """All parts of a convolution, or the reason why there are none; nothing of it stays on the GPU."""
    try:
        found = [{"what": task.what(part), **row} for part, row in convolve(task)]
    except Exception as error:  # noqa: BLE001  # of any kind: the others are worth having
        found, failure = [], f"{task}: {type(error).__name__}: {error}"[:300]
    else:
        failure = None
    torch.cuda.empty_cache()
    return found, failure


def convolve(task: Task) -> Iterator[tuple[str, dict[str, Any]]]:
    """The three parts of a convolution; of the first run of each, in which cuDNN chooses: so it is in a training."""
    case, precision, last, benchmark = task
    dtype = DTYPES[precision]
    layout = torch.contiguous_format
    if last:
        layout = torch.channels_last if case.dimensions == 2 else torch.channels_last_3d
    shape = (int(case.pixels),) * case.dimensions
    kernel = (int(case.kernel),) * case.dimensions
    x = torch.randn(case.batch, case.inputs, *shape, device="cuda", dtype=dtype).to(memory_format=layout)
    w = torch.randn(case.outputs, case.inputs // case.groups, *kernel, device="cuda", dtype=dtype)
    w = w.to(memory_format=layout)
    each = case.dimensions
    more = ([case.stride] * each, [task.padding] * each, [case.dilation] * each, False, [0] * each, case.groups)
    with conditions(precision, benchmark):
        forward, _, y = taken(lambda: aten.convolution(x, w, None, *more))
        gradient = torch.ones_like(y)
        backward = {
            part: taken(lambda: aten.convolution_backward(gradient, x, w, None, *more, mask))[0]  # noqa: B023
            for part, mask in (("input", [True, False, False]), ("weight", [False, True, False]))
        }
    sizes = {name: t.numel() * t.element_size() for name, t in (("x", x), ("weight", w), ("y", y))}
    for part, beside in {"forward": forward, **backward}.items():
        key = f"{part}/{precision}/{'last' if last else 'first'}/{case.kind}{'/benchmark' if benchmark else ''}"
        yield part, {"key": key, **sizes, "taken": max(0, beside)}


def normalise(last: bool, dtype: torch.dtype, batch: int, channels: int, pixels: int) -> dict[str, Any]:
    x = torch.randn(batch, channels, pixels, pixels, device="cuda", dtype=dtype)
    x = x.to(memory_format=torch.channels_last if last else torch.contiguous_format)
    one, zero = torch.ones(channels, device="cuda"), torch.zeros(channels, device="cuda")
    beside, _, found = taken(lambda: aten.cudnn_batch_norm(x, one, zero, zero.clone(), one.clone(), True, 0.1, 1e-5))
    reserve = found[3].numel() * found[3].element_size()
    return {"last": last, "dtype": str(dtype), "numel": x.numel(), "reserve": reserve, "beside": beside}


def attend(backend: SDPBackend, batch: int, heads: int, length: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """What the backward pass of attention has beside its gradients, in copies of the queries in fp32."""
    q, k, v = (
        torch.randn(batch, heads, length, width, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
    )
    with sdpa_kernel(backend):
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        ones = torch.ones_like(y)
        beside, _, _ = taken(lambda: torch.autograd.grad(y, (q, k, v), ones, retain_graph=True))
    return {"backend": backend.name, "copies": max(0, beside - 4 * batch * heads * length) / (4 * q.numel())}


def attend_by_default(way: str, batch: int, heads: int, length: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """What attention keeps and takes when PyTorch chooses the kernel, in the layout that a projection leaves."""
    few = heads // 2 if way == "grouped" else heads
    q, k, v = (
        torch.randn(batch, length, number, width, device="cuda", dtype=dtype, requires_grad=True)
        for number in (heads, few, few)
    )
    mask = torch.ones(batch, 1, length, length, device="cuda", dtype=torch.bool) if way == "mask" else None
    ways = {"is_causal": way == "causal", "dropout_p": 0.1 if way == "dropout" else 0.0, "enable_gqa": way == "grouped"}
    run = lambda: nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), mask, **ways)  # noqa: E731
    forward, left, y = taken(run)
    node = y.grad_fn.name() if y.grad_fn is not None else ""
    ones = torch.ones_like(y)
    backward, _, _ = taken(lambda: torch.autograd.grad(y, (q, k, v), ones))
    kept = left - y.numel() * y.element_size()
    return {"way": way, "node": node, "forward": forward, "kept": kept, "backward": backward}


def recur(
    cell: str, batch: int, length: int, inputs: int, width: int, layers: int, both: bool, dropout: float
) -> dict[str, Any]:
    """Bytes of a recurrent network, with an input of another width, one way or both; graphs are not kept."""
    kinds = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
    net = kinds[cell](inputs, width, layers, bidirectional=both, dropout=dropout).cuda()
    x = torch.randn(length, batch, inputs, device="cuda", requires_grad=True)
    net(x)
    forward, left, (y, state) = taken(lambda: net(x))
    ones = torch.ones_like(y)
    backward, given, _ = taken(lambda: torch.autograd.grad(y, (x, *net.parameters()), ones))
    states = state if isinstance(state, tuple) else (state,)
    seen = sum(t.numel() * t.element_size() for t in (y, *states))
    return {"kept": left - seen, "forward": forward, "backward": backward, "given": given}


def multiply() -> dict[str, Any]:
    """The workspace that cuBLAS keeps; measured in a thread's first product."""
    a = torch.randn(512, 512, device="cuda")
    torch.cuda.synchronize()
    beside, left, c = taken(lambda: a @ a)
    return {"beside": beside, "kept": left - c.numel() * c.element_size()}


def step_foreach(numel: int, count: int) -> dict[str, Any]:
    """What Adam's foreach step has at most, in copies of its parameters: a check of what the engine sees."""
    weights = [torch.randn(numel, device="cuda", requires_grad=True) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Adam(weights, foreach=True)
    optimizer.step()
    beside, _, _ = taken(optimizer.step)
    return {"copies": beside / (4 * numel * count)}


def product_of(dtype: torch.dtype) -> Tensor:
    """A product and its gradient, for which cuBLAS is loaded."""
    a = torch.randn(256, 256, device="cuda", dtype=dtype, requires_grad=True)
    (a @ a).sum().backward()
    return a
