"""Attention, recurrent layers, CTC and sums by the operations that a GPU would take, rather than by others."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hotloop.simulate.operations import is_simulated
from hotloop.simulate.patches import Patches

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # as cuDNN counts them
_ROWS = 8  # numbers at whose multiples the rows of a mask begin
_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}


class Kernels:
    """Chooses operations as PyTorch does on a card of a capability."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability
        self._attention = functional.scaled_dot_product_attention

    def install(self, patches: Patches) -> None:
        patches.set(functional, "scaled_dot_product_attention", self.attention)
        for name in _MODES:
            patches.set(torch._VF, name, self._recurrent(name, getattr(torch._VF, name)))
        patches.set(torch, "ctc_loss", _with_lengths_on_host(torch.ctc_loss))
        patches.set(functional, "linear", _with_bias_in_place(functional.linear))

    def attention(
        self,
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
        if not (is_simulated(query) and is_simulated(key) and is_simulated(value)):
            return self._attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        query, key, value = _cast([query, key, value])
        ops = torch.ops.aten
        fits = query.dim() == 4 and query.size(-1) == key.size(-1) == value.size(-1)
        fits = fits and all(t.size(-1) == 1 or t.stride(-1) == 1 for t in (query, key, value))
        if fits and attn_mask is None and self._flash(query):
            padded = [functional.pad(t, (0, -t.size(-1) % 8)) if t.size(-1) % 8 else t for t in (query, key, value)]
            factor = query.size(-1) ** -0.5 if scale is None else scale
            found = ops._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=factor)[0]
            return found[..., : query.size(-1)] if query.size(-1) % 8 else found
        if fits and not enable_gqa and torch.backends.cuda.mem_efficient_sdp_enabled():
            bias = None if attn_mask is None else _bias(attn_mask, query, key, pads=not self._cudnn(query, attn_mask))
            learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
            return ops._scaled_dot_product_efficient_attention(
                query, key, value, bias, learns, dropout_p, is_causal, scale=scale
            )[0]
        with torch.autocast("cuda", enabled=False):  # whose casts are done: half precision is computed in fp32 here
            return ops._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
            )[0]

    def _flash(self, query: Tensor) -> bool:
        return (
            self._capability >= (8, 0)
            and query.dtype in (torch.float16, torch.bfloat16)
            and query.size(-1) <= 256
            and torch.backends.cuda.flash_sdp_enabled()
        )

    def _cudnn(self, query: Tensor, mask: Tensor) -> bool:
        """Whether cuDNN attends with a mask, where these cards prefer it: it takes masks as they lie."""
        half = query.dtype in (torch.float16, torch.bfloat16) and query.size(-1) <= 128 and query.size(-1) % 8 == 0
        return half and self._capability[0] in (9, 10) and not mask.requires_grad

    def _recurrent(self, name: str, original: Any) -> Any:
        def layer(source: Tensor, *rest: Any) -> Any:
            if not is_simulated(source) or not torch.backends.cudnn.enabled:
                return original(source, *rest)
            packed = not isinstance(rest[2], bool)  # then the sizes of its batches come first
            sizes: list[int] = []
            if packed:
                batch_sizes, hidden, weights, biases, layers, dropout, train, both = rest
                sizes, first = batch_sizes.tolist(), False
            else:
                hidden, weights, biases, layers, dropout, train, both, first = rest
            return _cudnn(name, source, sizes, hidden, (weights, biases, layers, dropout, train, both, first))

        return layer


def _cudnn(name: str, source: Tensor, sizes: list[int], hidden: Any, settings: tuple[Any, ...]) -> Any:
    weights, biases, layers, dropout, train, both, first = settings
    states = list(hidden) if isinstance(hidden, list | tuple) else [hidden]
    source, *others = _cast([source, *states, *weights])
    states, weights = others[: len(states)], others[len(states) :]
    width = weights[0].size(0) // _GATES[name]
    project = states[0].size(-1) if name == "lstm" and states[0].size(-1) != width else 0
    per_layer = (4 if biases else 2) + bool(project)
    output, h, c, _, _ = torch._cudnn_rnn(
        source, weights, per_layer, None, states[0], states[1] if len(states) > 1 else None,
        _MODES[name], width, project, layers, first, dropout, train, both, sizes, None,
    )  # fmt: skip
    return (output, h, c) if name == "lstm" else (output, h)


def _with_lengths_on_host(original: Any) -> Any:
    """`ctc_loss` brings lengths to the host; for tensors without data PyTorch would leave that out."""

    def loss(log_probs: Tensor, targets: Tensor, inputs: Any, lengths: Any, *rest: Any, **named: Any) -> Any:
        if is_simulated(log_probs):
            inputs, lengths = (each.tolist() if isinstance(each, Tensor) else each for each in (inputs, lengths))
        return original(log_probs, targets, inputs, lengths, *rest, **named)

    return loss


def _with_bias_in_place(original: Any) -> Any:
    """To a product of what is not contiguous a bias is added in place; without data PyTorch would make another."""

    def linear(source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        tensors = (source, weight, bias)
        if bias is None or source.dim() < 3 or source.is_contiguous() or not all(map(is_simulated, tensors)):
            return original(source, weight, bias)
        product = original(source, weight)
        return product.add_(bias.to(product.dtype))

    return linear


def _cast(tensors: list[Tensor]) -> list[Tensor]:
    """What autocast does with the operands of these operations."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    wanted = torch.get_autocast_dtype("cuda")
    return [t.to(wanted) if t.is_floating_point() else t for t in tensors]


def _bias(mask: Tensor, query: Tensor, key: Tensor, *, pads: bool) -> Tensor:
    """A mask as the numbers that are added to the scores, for each query and key.

    The memory-efficient kernel wants rows that begin at multiples of 8: PyTorch copies others into longer ones.
    """
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    elif mask.dtype != query.dtype:
        mask = mask.to(query.dtype)
    if pads and (mask.stride(-1) != 1 or any(stride % _ROWS for stride in mask.stride()[:-1])):
        length = mask.size(-1)
        mask = functional.pad(mask, (0, _ROWS - length % _ROWS))[..., :length]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
