"""Memory that operations take besides their results: what cuBLAS, cuDNN and attention need for themselves.

What is not here needs no model, because it is a tensor that the engine sees: the temporaries of foreach optimizers, the
casts that autocast keeps, the scale of a `GradScaler`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from hotloop.simulate.cards import Card
from hotloop.simulate.constants import Constants, measured, measured_operations
from hotloop.simulate.convolutions import FAR, Case, Workspace, case_of, workspace
from hotloop.simulate.events import Operation, Shape
from hotloop.simulate.families import kind_of
from hotloop.simulate.need import PROCESS, RESULT, TOGETHER, Need, together
from hotloop.simulate.ordering import disordered
from hotloop.simulate.recurrent import rnn, rnn_backward
from hotloop.simulate.reductions import buffers, summed
from hotloop.simulate.work import switches

_BLAS = ("mm", "addmm", "bmm", "baddbmm", "linear", "addmv", "mv", "addbmm", "dot", "vdot", "addr", "_scaled_mm")
_CONVOLUTIONS = ["convolution", "_convolution", "cudnn_convolution", "cudnn_convolution_transpose"]
_BATCH_NORMS = ["cudnn_batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"]
_LT_WORKSPACE = 2**20
CONVOLUTION = "convolution workspace"
_PLAIN = ("view", "pointwise", "copy", "fill", "random", "gather", "optimizer-foreach", "optimizer-fused")
_LARGE_BLAS = {9, 10, 12}  # majors of capabilities that get 32 MiB


def needs(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """What an operation takes besides its results, in the order in which it takes it."""
    name = base_name(operation)
    copies = together(Need(each.nbytes, "copy in order", ahead=0) for each in disordered(operation, name))
    find = _FAMILIES.get(name, _unmeasured)
    own = find(operation, card, constants)
    return (*copies, *(need for need in own if need.bytes > 0 or need.high is not None))


def with_settings(operation: Operation) -> Operation:
    """An operation with the settings that cuDNN chooses its plan by."""
    if "convolution" not in operation.name:
        return operation
    settings = {"allow_tf32": switches().cudnn, "benchmark": torch.backends.cudnn.benchmark}
    return replace(operation, arguments={**operation.arguments, **settings})


def base_name(operation: Operation) -> str:
    """The name of an operation alone.

    >>> base_name(Operation("aten.addmm.default", (), ()))
    'addmm'
    """
    parts = operation.name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def adds_gradients(operation: Operation | None) -> bool:
    """Whether an operation adds a gradient to another, or puts it into zeros.

    PyTorch does that in place where nobody else has the first; what is simulated cannot be changed in place there.
    """
    if operation is None or operation.phase != "backward":
        return False
    if operation.name == "aten.add.Tensor" and len(operation.inputs) == 2:
        first, second = operation.inputs
        return (first.sizes, first.dtype) == (second.sizes, second.dtype)
    return base_name(operation) in ("index_put", "_unsafe_index_put") and bool(operation.arguments.get("accumulate"))


def library(operation: Operation) -> str | None:
    """The library that an operation loads at its first use: blas, cudnn or attention."""
    name = base_name(operation)
    if name in _BLAS:
        return "blas"
    if "convolution" in name or name.startswith(("_cudnn", "cudnn")):
        return "cudnn"
    return "attention" if "attention" in name else None


def blas_workspace(card: Card) -> int:
    """Bytes that PyTorch gives to each handle of cuBLAS on each stream."""
    return 32 * 2**20 if card.capability[0] in _LARGE_BLAS else 2 * 4096 * 1024 + 8 * 16 * 1024


def _blas(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """One workspace per thread: autograd's backward pass runs in a thread of its own, with a handle of its own.

    A product to which a bias is added is cuBLASLt's, which gets another.
    """
    thread = "backward" if operation.phase == "backward" else "main"
    found = Need(blas_workspace(card), "cuBLAS workspace", PROCESS, f"cublas {thread}")
    if base_name(operation) != "addmm" or len(operation.inputs[0].sizes) != 1:
        return (found,)
    return (found, Need(_LT_WORKSPACE, "cuBLASLt workspace", PROCESS, f"cublaslt {thread}"))


class Asked(NamedTuple):
    """One part of a convolution (forward, input or weight), as a table is asked for its workspace."""

    keys: tuple[str, ...]  # of the table, the most particular first
    case: Case
    x: int  # bytes of its operands
    weight: int
    y: int


def asked(operation: Operation, card: Card) -> list[Asked]:
    """The parts of a convolution that cuDNN plans, in the order in which they run."""
    if "backward" not in operation.name:
        x, weight = operation.inputs[:2]
        return [_asked("forward", x, weight, operation.outputs[0], operation, card)]
    y, x, weight = operation.inputs[:3]
    wanted = operation.arguments.get("output_mask") or (True, True, True)
    parts = [part for part, wants in zip(("input", "weight"), wanted, strict=False) if wants]
    return [_asked(part, x, weight, y, operation, card) for part in parts]


def _asked(part: str, x: Shape, weight: Shape, y: Shape, operation: Operation, card: Card) -> Asked:
    arguments = operation.arguments
    layout = "last" if x.channels_last or weight.channels_last else "first"
    if arguments.get("transposed"):  # which cuDNN runs as the gradient of the convolution from its output to its input
        part, x, y = {"forward": "input", "input": "forward"}.get(part, part), y, x
    precision = _precision(x, card, arguments.get("allow_tf32", True))
    keys = [f"{part}/{precision}/{layout}", f"{part}/half/{layout}"][: 2 if precision == "fp16" else 1]
    keys = [f"{key}/benchmark" for key in keys if arguments.get("benchmark")] + keys
    stride, dilation = (max(arguments.get(name) or (1,)) for name in ("stride", "dilation"))
    case = case_of(x.sizes, weight.sizes, stride, arguments.get("groups") or 1, dilation)
    return Asked(tuple(keys), case, x.nbytes, weight.nbytes, y.nbytes)


def planned(part: Asked, constants: Constants, beyond: float = 0.0) -> Workspace:
    """The workspace of a part by a table, as if nothing nearer than `beyond` had been measured.

    What was measured on another architecture tells how far a table that was not measured may be off.
    """
    rows = next((constants.convolution[key] for key in part.keys if key in constants.convolution), ())
    found = workspace(rows, *part[1:], beyond=beyond)
    if constants.calibrated:
        return found
    others = [planned(part, each, beyond) for each in measured()]
    low = min([found.bytes, *(each.low for each in others)])
    high = max([found.bytes, *(each.high for each in others)])
    return found._replace(low=low, high=high, distance=float("inf"))


def _workspaces(operation: Operation, card: Card, constants: Constants) -> list[Need]:
    """What cuDNN's plans for the parts of a convolution take, one after the other."""
    found = [planned(part, constants) for part in asked(operation, card)]
    return [Need(each.bytes, CONVOLUTION, least=0, low=each.low, high=each.high, doubt=_doubt(each)) for each in found]


def _doubt(found: Workspace) -> str:
    if found.distance == float("inf"):
        return "convolutions like it were not measured on this GPU"
    if found.distance > FAR:
        return f"no convolution like it was measured: the nearest has a distance of {found.distance:.1f}"
    return "cuDNN takes different plans for the convolutions nearest to it"


def _precision(x: Shape, card: Card, allow_tf32: bool) -> str:
    if x.itemsize == 2:
        return "fp16" if x.dtype == "float16" else "half"
    return "tf32" if x.dtype == "float32" and card.capability >= (8, 0) and allow_tf32 else "fp32"


def _convolution(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    return (*_workspaces(operation, card, constants),)


def _convolution_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """The gradient of the input first, then that of the weight: their workspaces are not held together."""
    y = operation.inputs[0]
    wanted = operation.arguments.get("output_mask") or (True, True, True)
    found = [replace(need, ahead=number) for number, need in enumerate(_workspaces(operation, card, constants), 1)]
    bias = buffers(y, (0, *range(2, len(y.sizes))), card) if wanted[2] else ()
    return (*found, *bias)


def _batch_norm(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    x = operation.inputs[0]
    if not operation.arguments.get("training", operation.arguments.get("train", True)) or not x.channels_last:
        return ()
    if x.dtype == "bfloat16":  # which PyTorch normalises by kernels of its own
        return ()
    half = ".half" if x.itemsize == 2 else ""
    reserve, moment = (constants.factors.get(f"batch_norm.{n}{half}", 0) * x.numel for n in ("reserve", "workspace"))
    return (Need(int(reserve), "batch norm reserve", RESULT), Need(int(moment), "batch norm workspace"))


def _flash_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """The gradient of the queries is added up in fp32, padded; grouped keys and values are expanded."""
    query, key = operation.inputs[1:3]
    if _cudnn_attends(query, card):
        return _cudnn_attention_backward(operation, card, constants)
    batch, heads, length, width = query.sizes
    rows = batch * heads * _up(length, 128)
    padded = _up(width, 32 if width <= 128 else 64)
    found = [Need(4 * rows, "attention sums"), Need(4 * rows * padded, "attention gradient in fp32")]
    if key.sizes[1] != heads:
        found += [Need(batch * heads * key.sizes[2] * width * key.itemsize, "attention, expanded keys")] * 2
    return together(found)


def _efficient_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """Sums of gradient times result, then the gradient of the queries in blocks, each with a lock of 16 bytes.

    In fp32 PyTorch makes the products first; in half precision the kernel does.
    """
    query = operation.inputs[1]
    learns = _learned_mask(operation)
    if _cudnn_attends(query, card):
        return (*_cudnn_attention_backward(operation, card, constants), *learns)
    batch, heads, length, width = query.sizes
    block = 64 if width <= 64 or query.itemsize == 4 else 128
    blocks = batch * heads * -(-length // block)
    sums = Need(4 * batch * heads * length, "attention sums", key=TOGETHER)
    gradient = Need(blocks * (4 * block * _up(width, block) + 16), "attention gradient in fp32")
    products = (Need(4 * query.numel, "attention products"),) if query.itemsize == 4 else ()
    return (sums, *products, gradient, *learns)


def _learned_mask(operation: Operation) -> tuple[Need, ...]:
    """Attention whose mask gets a gradient was not measured."""
    if not any((operation.arguments.get("grad_input_mask") or ())[3:]):
        return ()
    return (_in_doubt(operation, "attention with a mask that learns was not measured"),)


def _cudnn_attention_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """The gradient of the queries in fp32 with its sums; those of grouped keys and values, for every head."""
    query, key = operation.inputs[1:3]
    batch, heads, length, width = query.sizes
    found = [Need(4 * batch * heads * length * (width + 1) + 256, "attention gradient in fp32")]
    if key.sizes[1] != heads:
        found += [Need(batch * heads * key.sizes[2] * width * key.itemsize, "attention, expanded keys")] * 2
    return together(found)


def _cudnn_attends(query: Shape, card: Card) -> bool:
    """Whether PyTorch lets cuDNN do what it lets flash and memory-efficient kernels do on other cards.

    Since 2.11, whose cuDNN is newer than 9.15, it prefers it on these, for every mask.
    """
    return card.capability[0] in (9, 10) and query.itemsize == 2 and query.sizes[-1] <= 128 and query.sizes[-1] % 8 == 0


def _embedding_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """Indices are sorted, and rows that come often are added up in fp32 in parts of ten, their width a whole warp's."""
    gradient, indices = operation.inputs[:2]
    number = indices.numel
    if number <= 3072 or not operation.outputs:
        return ()
    parts = number // 10 + min(number, operation.outputs[0].sizes[0])
    width = _up(gradient.sizes[-1], 32)
    found = [Need(8 * number, "sorted indices")] * 5 + [Need(8 * parts, "parts of an embedding")]
    return together([*found, Need(4 * width * parts, "embedding gradient in fp32")])


def _index_put(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """Indices are sorted; values that do not begin with the dimensions of the indices are put in that order."""
    if not operation.arguments.get("accumulate") or len(operation.inputs) < 3:
        return ()
    *indices, values = operation.inputs[1:]
    first = max(indices, key=lambda each: each.numel)
    found = [Need(8 * first.numel, "sorted indices")] * 3
    if values.sizes[: len(first.sizes)] != first.sizes:
        found.append(Need(values.nbytes, "values in order"))
    return together(found)


def _safe_softmax(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    return (Need(operation.inputs[0].numel, "rows that are masked"),)


def _softmax_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    gradient = operation.inputs[0]
    return (Need(gradient.nbytes, "gradient times result"),)


def _binary_cross_entropy(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """Its two terms, of which one becomes the result where the losses are asked for one by one."""
    x = operation.inputs[0]
    mean = bool(operation.outputs) and operation.outputs[0].numel < x.numel
    return together([Need(x.nbytes, "terms of a loss")] * (2 if mean else 1))


def _sum(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    return summed(operation, card)


def _sort(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    return (Need(sum(shape.nbytes for shape in operation.outputs), "buffers of a sort"),)


def _foreach_norm(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """A partial sum for each piece of 65,536 numbers, as many for every tensor as for the largest."""
    if not operation.inputs:
        return ()
    pieces = max(-(-shape.numel // 65536) for shape in operation.inputs)
    return (Need(4 * pieces * len(operation.inputs), "partial norms"),)


def _unmeasured(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """What no rule is known for: nothing where it ran in a training that was measured, or works on elements.

    Otherwise up to a copy of its operands, below which nine of ten of the rules here stay.
    """
    known = measured_as(operation)
    if known is None or known in measured_operations():
        return ()
    return (_in_doubt(operation, f"{base_name(operation)} in this precision is in no training that was measured"),)


def _in_doubt(operation: Operation, why: str) -> Need:
    operands = sum(shape.nbytes for shape in (*operation.inputs, *operation.outputs))
    return Need(0, f"memory of {base_name(operation)}", low=0, high=operands, doubt=why)


def measured_as(operation: Operation) -> str | None:
    """The name by which the table of measured operations knows an operation; None: its kind takes nothing for itself.

    >>> measured_as(Operation("aten.argmax.default", (), ())), measured_as(Operation("aten.relu.default", (), ()))
    ('argmax/full', None)
    """
    kind = kind_of(operation.name)
    if (kind.known and kind.family in _PLAIN) or base_name(operation) in _FAMILIES:
        return None
    half = any(shape.dtype in ("bfloat16", "float16") for shape in (*operation.inputs, *operation.outputs))
    return f"{base_name(operation)}/{'half' if half else 'full'}"


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


Finder = Callable[[Operation, Card, Constants], tuple[Need, ...]]
_FAMILIES: dict[str, Finder] = {
    **dict.fromkeys(_BLAS, _blas),
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_BATCH_NORMS, _batch_norm),
    "convolution_backward": _convolution_backward,
    "_cudnn_rnn": rnn,
    "_cudnn_rnn_backward": rnn_backward,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "embedding_dense_backward": _embedding_backward,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_unsafe_index_put": _index_put,
    "sort": _sort,
    "_foreach_norm": _foreach_norm,
    **dict.fromkeys(("sum", "mean", "nansum", "linalg_vector_norm", "norm"), _sum),
    "_safe_softmax": _safe_softmax,
    "_softmax_backward_data": _softmax_backward,
    "binary_cross_entropy_with_logits": _binary_cross_entropy,
}
