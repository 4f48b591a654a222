"""How many floating-point operations one call of an operation is, and in which precision."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hotloop._torch import CPU_ATTENTION, CPU_ATTENTION_BACKWARD
from hotloop.device.backend import backend_of
from hotloop.values.tree import tensors_of

PRECISION_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_UNCOUNTABLE = (TypeError, ValueError, AssertionError, AttributeError, IndexError, RuntimeError)


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


# On a CPU, where torch's own table does not know of it; these take shapes, the others tensors.
ATTENTION: dict[Any, Any] = {
    **dict.fromkeys(CPU_ATTENTION, _attention),
    **dict.fromkeys(CPU_ATTENTION_BACKWARD, _attention_backward),
}


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Floating-point operations of a call, of matmuls and convolutions; others are few and count as none.

    >>> a = torch.ones(2, 3)
    >>> flops_of(torch.ops.aten.mm.default, (a, a.T), {}, a @ a.T)
    24.0
    """
    packet = getattr(func, "overloadpacket", None)
    try:
        if packet in ATTENTION:
            return float(ATTENTION[packet](*(a.shape if isinstance(a, Tensor) else a for a in args)))
        if packet in flop_registry:
            return float(flop_registry[packet](*args, **kwargs, out_val=result))
    except _UNCOUNTABLE:  # an overload that the table does not foresee
        pass
    return 0.0


def precision_of(args: Any) -> str:
    """The precision in which an operation on these tensors is computed.

    >>> precision_of([torch.ones(2, dtype=torch.bfloat16)])
    'bf16'
    """
    floating = (tensor for tensor in tensors_of(args) if tensor.is_floating_point())
    first = next(floating, None)
    if first is None:
        return "fp32"
    if first.dtype == torch.float32 and backend_of(first.device).has_tf32 and _tf32():
        return "tf32"
    return PRECISION_NAMES.get(first.dtype, str(first.dtype).removeprefix("torch."))


def _tf32() -> bool:
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set through the newer switches, which forbids to ask through the older
        return False
