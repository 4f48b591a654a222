"""What tells operations of one family apart: which kernel does them, and the sizes that decide how well it goes."""

from math import gcd, prod

from hotloop.simulate.events import Operation, Shape
from hotloop.simulate.families import Kind
from hotloop.simulate.products import Product

_NORMS = {
    "softmax": "softmax",
    "batch_norm": "batch",
    "group_norm": "group",
    "layer_norm": "layer",
    "rms_norm": "layer",
}
LAST_HEADS = ("_flash_attention", "_efficient_attention", "_cudnn_attention")  # take (batch, length, heads, width)
_POOLS = ("max_pool", "avg_pool", "upsample")


def variant_of(operation: Operation, kind: Kind) -> str:
    """The variant of an operation that memory bounds.

    >>> from hotloop.simulate.families import kind_of
    >>> x, total = Shape((8, 4), "float32", 4), Shape((4,), "float32", 4)
    >>> summed = Operation("aten.sum.dim_IntList", (x,), (total,), {"dim": [0]})
    >>> variant_of(summed, kind_of(summed.name))
    'columns'
    """
    family, base = kind.family, kind.base
    if family.startswith("norm"):
        return next((variant for part, variant in _NORMS.items() if part in base), "")
    if family == "reduction":
        return _reduced(operation)
    if family == "copy":
        return _copied(operation, base)
    if family == "random":
        return "dropout" if "dropout" in base else "drawn"
    if family == "pooling":
        pool = next((pool for pool in _POOLS if pool in base), "")
        return f"{pool}-backward" if pool and base.endswith("backward") else pool
    if family in ("gather", "scatter"):
        if operation.arguments.get("accumulate"):
            return "added"
        return "embedding" if base.startswith("embedding") else "loss" if base.startswith("nll_loss") else ""
    return ""


def _reduced(operation: Operation) -> str:
    """All, rows (the last dimension goes) or columns (it stays)."""
    image, *_ = operation.inputs
    if not operation.outputs or operation.outputs[0].numel <= 1:
        return "all"
    last = len(image.sizes) - 1
    over = operation.arguments.get("dim")
    over = [over] if isinstance(over, int) else over or range(last + 1)
    return "rows" if last in [number % (last + 1) for number in over] else "columns"


def _copied(operation: Operation, base: str) -> str:
    """Whether values are cast, or are read across the order in which they lie."""
    source, *others = operation.inputs
    target = operation.outputs[0] if operation.outputs else (others or [source])[0]
    if base == "copy" and others:
        source = others[0]
    if source.dtype != target.dtype and source.numel == target.numel:
        return "cast"
    across = base == "clone" and len(source.sizes) == 2 and operation.arguments.get("memory_format") is not None
    reordered = base in ("clone", "_to_copy", "copy") and source.channels_last != target.channels_last
    return "transposed" if across or reordered else "plain"


def traits_of(operation: Operation, kind: Kind, variant: str) -> tuple[int, ...]:
    """The sizes of an operation that memory bounds; none where its bytes say all."""
    family = kind.family
    if family.startswith("norm") and operation.inputs:
        image = max(operation.inputs, key=lambda shape: shape.numel)
        return _image(image) if variant in ("batch", "group") else _rows(image)
    if family == "pooling":
        return _image(max((*operation.inputs, *operation.outputs), key=lambda shape: shape.numel))
    if family == "reduction" and variant != "all":
        return _rows(operation.inputs[0])
    if family in ("gather", "scatter") and variant == "embedding":
        table, rows = (
            (operation.inputs[0], operation.outputs[0])
            if family == "gather"
            else (
                operation.outputs[0],
                operation.inputs[0],
            )
        )
        return table.sizes[0], rows.numel // max(rows.sizes[-1], 1), rows.sizes[-1]
    return ()


def _rows(shape: Shape) -> tuple[int, ...]:
    width = shape.sizes[-1] if shape.sizes else 1
    return shape.numel // max(width, 1), width


def _image(shape: Shape) -> tuple[int, ...]:
    batch, channels, *sides = (*shape.sizes, 1, 1)[: max(len(shape.sizes), 2)]
    return batch, channels, prod(sides)


def of_convolution(product: Product, weight: tuple[int, ...], operation: Operation) -> tuple[str, tuple[int, ...]]:
    """Variant and sizes of a convolution: places, channels read and written, the area of the window, the stride."""
    area = prod(weight[2:])
    stride = operation.arguments.get("stride") or (1,)
    step = max(stride) if isinstance(stride, list | tuple) else int(stride)
    if min(weight[:2]) <= 4:
        variant = "colours"  # of an image, which are too few for the quick kernels
    elif area == 1 and step == 1:
        variant = "1x1"  # a product of matrices as they lie
    else:
        variant = ""
    places = product.flops // (2 * max(prod(weight), 1))  # whichever gradient it is
    return variant, (places, weight[1], weight[0], area, step, gcd(weight[0], weight[1], 64))


def of_product(product: Product) -> tuple[int, ...]:
    """Sizes of a product, and how well its rows are aligned: vocabularies of odd sizes have slower kernels."""
    aligned = gcd(product.rows, product.columns, product.inner, 8)
    return product.count, product.rows, product.columns, product.inner, aligned


def is_transposed(operation: Operation) -> bool:
    return bool(operation.arguments.get("transposed", False)) or "transpose" in operation.name


def of_recurrence(operation: Operation, steps: int) -> tuple[int, ...]:
    """Sequences at once, steps one after another over all layers, and the width of the state."""
    image = operation.inputs[0].sizes
    arguments = operation.arguments
    tokens = prod(image[:-1])
    layers = int(arguments.get("num_layers", 1)) * (2 if arguments.get("bidirectional") else 1)
    return tokens * layers // max(steps, 1), steps, int(arguments.get("hidden_size", image[-1]))


def of_attention(operation: Operation, base: str, *, backward: bool) -> tuple[int, ...]:
    """Heads of all sequences, queries, keys, the width of a head, and 2 for a causal mask, 2 for dropout."""
    query, key = (shape.sizes for shape in operation.inputs[backward : 2 + backward])
    if len(query) != 4:
        return ()
    heads, length = (2, 1) if base.startswith(LAST_HEADS) else (1, 2)
    causal = operation.arguments.get("is_causal") or operation.arguments.get("custom_mask_type")
    drops = (operation.arguments.get("dropout_p") or 0.0) > 0
    return query[0] * query[heads], query[length], key[length], query[-1], 2 if causal else 1, 2 if drops else 1
