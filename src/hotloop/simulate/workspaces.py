"""Memory that operations take besides their results: what cuBLAS, cuDNN and attention need for themselves.

What is not here needs no model, because it is a tensor that the engine sees: the temporaries of foreach optimizers, the
casts that autocast keeps, the scale of a `GradScaler`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from hotloop.simulate.cards import Card
from hotloop.simulate.constants import Constants
from hotloop.simulate.events import Operation, Shape

MOMENT, RESULT, PROCESS = "moment", "result", "process"  # how long memory is kept: see `Need`
_BLAS = ("mm", "addmm", "bmm", "baddbmm", "linear", "addmv", "mv", "addbmm", "dot", "vdot", "addr", "_scaled_mm")
_CONVOLUTIONS = ["convolution", "_convolution", "cudnn_convolution", "cudnn_convolution_transpose"]
_BATCH_NORMS = ["cudnn_batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"]
_CELLS = {0: "rnn", 1: "rnn", 2: "lstm", 3: "gru"}  # cuDNN's modes
_LARGE_BLAS = {9, 10, 12}  # majors of capabilities that get 32 MiB


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that an operation takes for itself."""

    bytes: int
    what: str
    lasting: str = MOMENT  # moment: until it has run; result: as long as what it saved; process: for ever, taken once
    key: str = ""  # of what is taken once
    least: int | None = None  # what it makes do with where there is no room


def needs(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """What an operation takes besides its results, in the order in which it takes it."""
    find = _FAMILIES.get(base_name(operation))
    return tuple(need for need in find(operation, card, constants) if need.bytes > 0) if find else ()


def base_name(operation: Operation) -> str:
    """The name of an operation alone.

    >>> base_name(Operation("aten.addmm.default", (), ()))
    'addmm'
    """
    parts = operation.name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


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
    """One workspace per thread: autograd's backward pass runs in a thread of its own, with a handle of its own."""
    thread = "backward" if operation.phase == "backward" else "main"
    return (Need(blas_workspace(card), "cuBLAS workspace", PROCESS, f"cublas {thread}"),)


def convolution(
    part: str, x: Shape, weight: Shape, y: Shape, operation: Operation, card: Card, constants: Constants
) -> int:
    """Bytes of cuDNN's plan for one part (forward, input or weight) of a convolution.

    A table has four factors for each kind of convolution: shares of the input, the weight and the output, and bytes
    that are always needed. Where tensor cores want channels last and get channels first, cuDNN copies all operands.
    """
    for key in _kinds(part, x, weight, operation, card):
        if key in constants.convolution:
            shares = constants.convolution[key]
            return int(sum(a * b for a, b in zip(shares, (x.nbytes, weight.nbytes, y.nbytes, 1), strict=True)))
    return 0


def _kinds(part: str, x: Shape, weight: Shape, operation: Operation, card: Card) -> list[str]:
    """Keys of a table, the most special first."""
    arguments = operation.arguments
    if arguments.get("groups", 1) not in (1, None):
        kind = "grouped"
    elif len(x.sizes) == 5:
        kind = "volume"
    else:
        kind = "pointwise" if prod(weight.sizes[2:]) == 1 else "spatial"
    if arguments.get("transposed"):
        part = {"forward": "input", "input": "forward"}.get(part, part)  # which is what cuDNN calls it
    layout = "last" if x.channels_last or weight.channels_last else "first"
    keys = [f"{part}/{_precision(x, card, arguments.get('allow_tf32', True))}/{layout}/{kind}"]
    keys.append(keys[0].rsplit("/", 1)[0] + "/spatial")
    return [*(f"{key}/benchmark" for key in keys if arguments.get("benchmark")), *keys]


def _precision(x: Shape, card: Card, allow_tf32: bool) -> str:
    if x.dtype in ("float16", "bfloat16"):
        return "half"
    return "tf32" if x.dtype == "float32" and card.capability >= (8, 0) and allow_tf32 else "fp32"


def _convolution(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    x, weight = operation.inputs[:2]
    size = convolution("forward", x, weight, operation.outputs[0], operation, card, constants)
    return (Need(size, "convolution workspace", least=0),)


def _convolution_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """The gradient of the input first, then that of the weight: their workspaces are not held together."""
    y, x, weight = operation.inputs[:3]
    wanted = operation.arguments.get("output_mask") or (True, True, True)
    return tuple(
        Need(convolution(part, x, weight, y, operation, card, constants), "convolution workspace", least=0)
        for part, asked in zip(("input", "weight"), wanted, strict=False)
        if asked
    )


def _batch_norm(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    x = operation.inputs[0]
    if not operation.arguments.get("training", operation.arguments.get("train", True)) or not x.channels_last:
        return ()
    size = int(constants.factors.get("batch_norm.reserve", 0) * x.numel)
    return (Need(size, "batch norm reserve", RESULT),)


def _rnn(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    cell, units = _cell(operation, operation.inputs[0])
    if not operation.arguments.get("train", True):
        return (Need(int(constants.factors.get(f"{cell}.workspace", 0) * units), "RNN workspace"),)
    return (
        Need(int(constants.factors.get(f"{cell}.reserve", 0) * units), "RNN reserve", RESULT),
        Need(int(constants.factors.get(f"{cell}.workspace", 0) * units), "RNN workspace"),
    )


def _rnn_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    cell, units = _cell(operation, operation.inputs[0])
    return (Need(int(constants.factors.get(f"{cell}.backward", 0) * units), "RNN workspace"),)


def _cell(operation: Operation, x: Shape) -> tuple[str, int]:
    """The kind of cell, and bytes of the hidden states of all steps, layers and directions."""
    arguments = operation.arguments
    directions = 2 if arguments.get("bidirectional") else 1
    layers = arguments.get("num_layers", 1)
    steps = prod(x.sizes[:-1])
    return _CELLS.get(arguments.get("mode", 2), "lstm"), (
        steps * arguments.get("hidden_size", x.sizes[-1]) * layers * directions * x.itemsize
    )


def _flash_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """The gradient of the queries is added up in fp32, padded; grouped keys and values are expanded."""
    query, key = operation.inputs[1:3]
    batch, heads, length, width = query.sizes
    rows = batch * heads * _up(length, 128)
    padded = _up(width, 32 if width <= 128 else 64)
    found = [Need(4 * rows, "attention sums"), Need(4 * rows * padded, "attention gradient in fp32")]
    if key.sizes[1] != heads:
        found += [Need(batch * heads * key.sizes[2] * width * key.itemsize, "attention, expanded keys")] * 2
    return _together(found)


def _efficient_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    query = operation.inputs[1]
    batch, heads, length, _ = query.sizes
    share = constants.factors.get("attention.efficient", 1.0 if query.itemsize == 2 else 0.0)
    found = [Need(4 * batch * heads * length, "attention sums")]
    return _together([*found, Need(int(share * 4 * query.numel), "attention gradient in fp32")])


def _cudnn_attention_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    query = operation.inputs[1]
    share = constants.factors.get("attention.cudnn", 1.0)
    return (Need(int(share * 4 * query.numel), "attention gradient in fp32"),)


def _embedding_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """Indices are sorted, and rows that come often are added up in fp32 in parts of ten."""
    gradient, indices = operation.inputs[:2]
    number = indices.numel
    if number <= 3072 or not operation.outputs:
        return ()
    rows = operation.outputs[0].sizes[0]
    distinct = rows * (1 - (1 - 1 / rows) ** number)  # of so many random ones
    parts = number / 10 + distinct
    width = gradient.sizes[-1]
    found = [Need(8 * number, "sorted indices")] * 2
    return _together([*found, Need(int(parts * (4 * width + 8)), "embedding gradient in fp32")])


def _index_put(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    if not operation.arguments.get("accumulate") or len(operation.inputs) < 3:
        return ()
    return _together([Need(8 * operation.inputs[-1].numel, "sorted indices")] * 3)


def _sort(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    return (Need(sum(shape.nbytes for shape in operation.outputs), "buffers of a sort"),)


def _foreach_norm(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """A partial sum for each piece of 65,536 numbers, as many for every tensor as for the largest."""
    if not operation.inputs:
        return ()
    pieces = max(-(-shape.numel // 65536) for shape in operation.inputs)
    return (Need(4 * pieces * len(operation.inputs), "partial norms"),)


def _together(found: list[Need]) -> tuple[Need, ...]:
    """Needs of the same moment that are held at once."""
    return tuple(replace(need, key="together") for need in found)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


Finder = Callable[[Operation, Card, Constants], tuple[Need, ...]]
_FAMILIES: dict[str, Finder] = {
    **dict.fromkeys(_BLAS, _blas),
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_BATCH_NORMS, _batch_norm),
    "convolution_backward": _convolution_backward,
    "_cudnn_rnn": _rnn,
    "_cudnn_rnn_backward": _rnn_backward,
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
}
