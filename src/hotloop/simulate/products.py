"""Floating-point operations of products, convolutions, attention and recurrent nets, from shapes alone."""

from dataclasses import dataclass
from math import prod

from hotloop.simulate.events import Operation

_LAST_HEADS = (
    "_flash_attention",
    "_efficient_attention",
    "_cudnn_attention",
)  # these take (batch, length, heads, width)


@dataclass(frozen=True, slots=True)
class Product:
    """So many products of a rows × inner matrix with an inner × columns one; what is not one is seen as one.

    >>> Product(1, 2, 3, 4).flops
    48
    """

    count: int
    rows: int
    columns: int
    inner: int

    @property
    def flops(self) -> int:
        return 2 * self.count * self.rows * self.columns * self.inner


def matrix_product(operation: Operation, base: str) -> Product:
    """The product that a matrix operation is, whatever is added to it."""
    shapes = [shape.sizes for shape in operation.inputs]
    if base == "linear":
        left, (columns, inner) = shapes[0], shapes[1]
        return Product(1, prod(left[:-1]), columns, inner)
    left, right = shapes[1:3] if base.lstrip("_").startswith(("add", "badd")) else shapes[:2]
    inner = left[-1]
    rows = left[-2] if len(left) > 1 else 1
    columns = right[-1] if len(right) > 1 else 1
    if base == "matmul" and len(right) <= 2:  # the batch makes more rows of one product
        return Product(1, prod(left[:-1]), columns, inner)
    return Product(max(prod(left[:-2]), prod(right[:-2])), rows, columns, inner)


def convolution(operation: Operation) -> Product:
    """A convolution as the product that it is: places × output channels, over what one output sees."""
    image, weight = operation.inputs[0].sizes, operation.inputs[1].sizes
    return _convolution(image, weight, operation.outputs[0].sizes, operation)


def convolution_backward(operation: Operation) -> tuple[Product | None, Product | None]:
    """The same for the gradients of image and weight, or None where one is not asked for."""
    out, image, weight = (shape.sizes for shape in operation.inputs[:3])
    forward = _convolution(image, weight, out, operation)
    mask = operation.arguments.get("output_mask", (True, True, True))
    # Each swaps the roles of the three sides, so their number of operations is the same.
    to_image = Product(forward.count, forward.rows, forward.inner, forward.columns)
    to_weight = Product(forward.count, forward.columns, forward.inner, forward.rows)
    return to_image if mask[0] else None, to_weight if mask[1] else None


def _convolution(
    image: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...], operation: Operation
) -> Product:
    transposed = bool(operation.arguments.get("transposed", False)) or "transpose" in operation.name
    groups = int(operation.arguments.get("groups", 1) or 1)
    spatial = len(weight) - 2
    places = prod((image if transposed else out)[-spatial:]) if spatial else 1
    batch = image[0] if len(image) == len(weight) else 1  # one image may come without a batch
    seen = weight[1] * prod(weight[2:])
    return Product(groups, batch * places, max(weight[0] // groups, 1), seen)


def depthwise(operation: Operation, weight: int) -> bool:
    """Whether each channel is convolved by itself; `weight` says which of the inputs holds the filters."""
    groups = int(operation.arguments.get("groups", 1) or 1)
    return groups > 1 and operation.inputs[weight].sizes[1] == 1


def attention(operation: Operation, base: str, *, backward: bool) -> float:
    """Operations of attention: two products forward, five backward, less what a causal mask leaves out."""
    query, key, value = (shape.sizes for shape in operation.inputs[backward : 3 + backward])
    if len(query) == 3:  # sequences of several lengths, laid end to end: all taken for as long as the longest
        longest = int(operation.arguments.get("max_k") or operation.arguments.get("max_seqlen_k") or key[0])
        pairs, queries, keys = query[1] * query[0] * longest, longest, longest
    else:
        heads, length = (2, 1) if base.startswith(_LAST_HEADS) else (1, 2)
        queries, keys = query[length], key[length]
        pairs = query[0] * query[heads] * queries * keys
    wide, deep = query[-1], value[-1]
    flops = 2.0 * pairs * ((3 * wide + 2 * deep) if backward else (wide + deep))
    causal = operation.arguments.get("is_causal") or operation.arguments.get("custom_mask_type")
    return flops * (_seen(queries, keys) if causal else 1.0)


def _seen(queries: int, keys: int) -> float:
    """The share of all pairs that a causal mask leaves.

    >>> _seen(4, 4)
    0.625
    """
    short = min(queries, keys)
    pairs = short * (short + 1) / 2 + max(queries - keys, 0) * keys
    return pairs / (queries * keys) if queries and keys else 0.0


def recurrent(operation: Operation, *, backward: bool) -> tuple[float, int]:
    """Operations of a recurrent net, and how many steps it makes one after another, over all its layers."""
    image = operation.inputs[0].sizes
    arguments = operation.arguments
    tokens = prod(image[:-1])
    lengths = arguments.get("batch_sizes") or ()
    steps = len(lengths) or image[1 if arguments.get("batch_first") else 0]
    matrices = [s for s in operation.inputs[1:] if len(s.sizes) == 2 and not (lengths and s.sizes[0] == tokens)]
    flops = 2.0 * tokens * sum(matrix.numel for matrix in matrices)
    layers = int(arguments.get("num_layers", 1)) * (2 if arguments.get("bidirectional") else 1)
    return flops * (2 if backward else 1), steps * layers
