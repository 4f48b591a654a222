"""Attention: which kernel a card takes for it, what that computes, and the memory that it takes."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hotloop.apps.simulate._torch import aten, attention_on_host, is_simulated
from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import Operation, Shape
from hotloop.apps.simulate.families.base import Family, Gradient, Kept, Kind, autocast, followed, in_doubt, up
from hotloop.apps.simulate.library_memory import Constants
from hotloop.apps.simulate.need import TOGETHER, Need, together
from hotloop.apps.simulate.products import Tf32, WorkPart, bytes_moved, precision_of
from hotloop.apps.simulate.replaced import Patches

_LAST_HEADS = ("_flash_attention", "_efficient_attention", "_cudnn_attention")  # take (batch, length, heads, width)
_ROWS = 8  # numbers at whose multiples the rows of a mask begin
_HALVES = (torch.float16, torch.bfloat16)


# The kernel that a card takes


def _install(patches: Patches, capability: tuple[int, int]) -> None:
    original = functional.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        if not (is_simulated(query) and is_simulated(key) and is_simulated(value)):
            return original(query, key, value, *args, **options)
        return _attend(capability, query, key, value, *args, **options)

    patches.set(functional, "scaled_dot_product_attention", attention)


def _attend(
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention`, by flash, memory-efficient or plain kernels."""
    query, key, value = autocast([query, key, value])
    fits = query.dim() == 4 and query.size(-1) == key.size(-1) == value.size(-1)
    fits = fits and all(t.size(-1) == 1 or t.stride(-1) == 1 for t in (query, key, value))
    fits = fits and (attn_mask is None or attn_mask.stride(-1) == 1)  # not so in T5, whose bias is looked up
    if fits and attn_mask is None and takes_flash(query, capability):
        padded = [functional.pad(t, (0, -t.size(-1) % 8)) if t.size(-1) % 8 else t for t in (query, key, value)]
        factor = query.size(-1) ** -0.5 if scale is None else scale
        flash = aten("_scaled_dot_product_flash_attention")
        found = flash(*padded, dropout_p, is_causal, False, scale=factor)[0]
        return found[..., : query.size(-1)] if query.size(-1) % 8 else found
    if fits and not enable_gqa and torch.backends.cuda.mem_efficient_sdp_enabled():
        pads = attn_mask is not None and not _takes_cudnn(query, attn_mask, capability)
        bias = None if attn_mask is None else _bias(attn_mask, query, key, pads=pads)
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        efficient = aten("_scaled_dot_product_efficient_attention")
        return efficient(query, key, value, bias, learns, dropout_p, is_causal, scale=scale)[0]
    with torch.autocast("cuda", enabled=False):  # whose casts are done: half precision is computed in fp32 here
        return aten("_scaled_dot_product_attention_math")(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]


def takes_flash(query: Tensor, capability: tuple[int, int]) -> bool:
    """Whether a card has a flash kernel for attention without a mask."""
    return (
        capability >= (8, 0)
        and query.dtype in _HALVES
        and query.size(-1) <= 256
        and torch.backends.cuda.flash_sdp_enabled()
    )


def _takes_cudnn(query: Tensor, mask: Tensor, capability: tuple[int, int]) -> bool:
    """Whether cuDNN attends with a mask, where these cards prefer it: it takes masks as they lie."""
    half = query.dtype in _HALVES and query.size(-1) <= 128 and query.size(-1) % 8 == 0
    return half and capability[0] in (9, 10) and not mask.requires_grad


def _bias(mask: Tensor, query: Tensor, key: Tensor, *, pads: bool) -> Tensor:
    """A mask as the numbers that are added to the scores, for each query and key.

    The memory-efficient kernel wants rows that begin at multiples of 8: PyTorch copies others into longer ones.
    """
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    elif mask.dtype != query.dtype:
        mask = mask.to(query.dtype)
    if pads and any(stride % _ROWS for stride in mask.stride()[:-1]):
        length = mask.size(-1)
        mask = functional.pad(mask, (0, _ROWS - length % _ROWS))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


# What it computes


def _work(operation: Operation, kind: Kind, tf32: Tf32, *, backward: bool) -> tuple[WorkPart, ...]:
    flops = _flops(operation, kind.base, backward=backward)
    precision = precision_of(operation, tf32=tf32.products)
    traits = _sizes(operation, kind.base, backward=backward)
    variant = "efficient" if "efficient" in kind.base else "flash"
    kernels = 3 if backward else 1
    return (WorkPart(kind.family, bytes_moved(operation), flops, precision, kernels, variant=variant, traits=traits),)


def _flops(operation: Operation, base: str, *, backward: bool) -> float:
    """Two products forward, five backward, less what a causal mask leaves out."""
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
    return flops * (_seen(queries, keys) if _is_causal(operation) else 1.0)


def _is_causal(operation: Operation) -> bool:
    return bool(operation.arguments.get("is_causal") or operation.arguments.get("custom_mask_type"))


def _seen(queries: int, keys: int) -> float:
    """The share of all pairs that a causal mask leaves.

    >>> _seen(4, 4)
    0.625
    """
    short = min(queries, keys)
    pairs = short * (short + 1) / 2 + max(queries - keys, 0) * keys
    return pairs / (queries * keys) if queries and keys else 0.0


def _sizes(operation: Operation, base: str, *, backward: bool) -> tuple[int, ...]:
    """Heads of all sequences, queries, keys, the width of a head, and 2 for a causal mask, 2 for dropout."""
    query, key = (shape.sizes for shape in operation.inputs[backward : 2 + backward])
    if len(query) != 4:
        return ()
    heads, length = (2, 1) if base.startswith(_LAST_HEADS) else (1, 2)
    causal, drops = _is_causal(operation), (operation.arguments.get("dropout_p") or 0.0) > 0
    return query[0] * query[heads], query[length], key[length], query[-1], 2 if causal else 1, 2 if drops else 1


# The memory that it takes


def _flash_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """The gradient of the queries is added up in fp32, padded; grouped keys and values are expanded."""
    query = operation.inputs[1]
    if _cudnn_attends(query, card):
        return _cudnn_backward(operation, card, constants)
    batch, heads, length, width = query.sizes
    rows = batch * heads * up(length, 128)
    padded = up(width, 32 if width <= 128 else 64)
    found = [Need(4 * rows, "attention sums"), Need(4 * rows * padded, "attention gradient in fp32")]
    return together([*found, *_expanded(operation)])


def _cudnn_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """The gradient of the queries in fp32 with its sums; those of grouped keys and values, for every head."""
    batch, heads, length, width = operation.inputs[1].sizes
    found = Need(4 * batch * heads * length * (width + 1) + 256, "attention gradient in fp32")
    return together([found, *_expanded(operation)])


def _expanded(operation: Operation) -> list[Need]:
    """Keys and values that several queries share, once for each."""
    query, key = operation.inputs[1:3]
    batch, heads, _, width = query.sizes
    if key.sizes[1] == heads:
        return []
    return [Need(batch * heads * key.sizes[2] * width * key.itemsize, "attention, expanded keys")] * 2


def _efficient_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """Sums of gradient times result, then the gradient of the queries in blocks, each with a lock of 16 bytes.

    In fp32 PyTorch makes the products first; in half precision the kernel does.
    """
    query = operation.inputs[1]
    learns = _learned_mask(operation)
    if _cudnn_attends(query, card) and not learns:
        return _cudnn_backward(operation, card, constants)
    batch, heads, length, width = query.sizes
    block = 64 if width <= 64 or query.itemsize == 4 else 128
    blocks = batch * heads * -(-length // block)
    sums = Need(4 * batch * heads * length, "attention sums", key=TOGETHER)
    gradient = Need(blocks * (4 * block * up(width, block) + 16), "attention gradient in fp32")
    products = (Need(4 * query.numel, "attention products"),) if query.itemsize == 4 else ()
    return (sums, *products, gradient, *learns)


def _learned_mask(operation: Operation) -> tuple[Need, ...]:
    """Attention whose mask gets a gradient was not measured."""
    if not any((operation.arguments.get("grad_input_mask") or ())[3:]):
        return ()
    return (in_doubt(operation, "attention with a mask that learns was not measured"),)


def _cudnn_attends(query: Shape, card: Card) -> bool:
    """Whether PyTorch lets cuDNN do what it lets flash and memory-efficient kernels do on other cards.

    Since 2.11, whose cuDNN is newer than 9.15, it prefers it on these, for every mask.
    """
    return card.capability[0] in (9, 10) and query.itemsize == 2 and query.sizes[-1] <= 128 and query.sizes[-1] % 8 == 0


# Its values, on the host


def _values(of: dict[str, Any]) -> tuple[list[Any], Kept | None]:
    bias = of.get("attn_bias")

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        grouped = query.size(1) != key.size(1)
        chance, causal = of["dropout_p"] or 0.0, bool(of["is_causal"])
        return [attention_on_host(query, key, value, mask, chance, causal, scale=of["scale"], enable_gqa=grouped)]

    return followed(attend, of["query"], of["key"], of["value"], *([] if bias is None else [bias]))


FAMILY = Family(
    members={
        "attention": "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
        " _scaled_dot_product_cudnn_attention _flash_attention_forward _efficient_attention_forward"
        " _cudnn_attention_forward _scaled_dot_product_flash_attention_for_cpu"
        " _scaled_dot_product_fused_attention_overrideable",
        "attention-backward": "_scaled_dot_product_flash_attention_backward"
        " _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward"
        " _flash_attention_backward _efficient_attention_backward"
        " _cudnn_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward"
        " _scaled_dot_product_fused_attention_overrideable_backward",
    },
    work={"attention": partial(_work, backward=False), "attention-backward": partial(_work, backward=True)},
    needs={
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
        "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    },
    forwards=dict.fromkeys(
        (f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")), _values
    ),
    backwards={
        "_scaled_dot_product_flash_attention_backward": Gradient("out", ("grad_out",)),
        "_scaled_dot_product_efficient_attention_backward": Gradient("out", ("grad_out_",)),
        "_scaled_dot_product_cudnn_attention_backward": Gradient("out", ("grad_out",)),
    },
    install=_install,
)
