"""Layers that divide by the root mean square, written out in several operations, become one kernel."""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from hotloop._torch import has_fused_rms_norm, module_hooks
from hotloop.levers.base import Lever, LeverRule, LeverTarget, Undo, replace_forward
from hotloop.plan import Plan

_EPS = ("variance_epsilon", "eps", "epsilon")  # what libraries call it
# Attributes that a copy has for itself.
_UNCHANGING = (bool, int, float, str, tuple, type(None), torch.dtype, torch.Size)
_CLOSE = 1e-5


class RMSNormLever(Lever):
    """**What it does.** Llama, Mistral, Qwen, T5 and similar models divide activations by their root mean square. In
    `transformers` that layer is written out: a cast, a square, a mean, a root, two products, each a kernel of its own
    over all activations, and twice as many in the backward pass. With this lever such a layer calls PyTorch's
    `rms_norm`, which is one kernel each way. In half precision it returns bf16 or fp16 directly; otherwise each linear
    layer after it would make that copy itself.

    **The numbers.** Tier B: sums are made in another order, and if several layers read the output, their gradients are
    added in half precision.

    **What it needs.** A CUDA device, a PyTorch that has that kernel, and a layer of any library or of your own that has
    a `weight` and an epsilon (`variance_epsilon`, `eps` or `epsilon`) and no other state. Its name does not matter: for
    two random inputs and weights it must give what `rms_norm` gives. `nn.RMSNorm` calls the kernel already.

    **What it costs.** Nothing to pull: hotloop tries a layer of each class on two small inputs.

    **By hand.**

    ```python
    loop = hotloop.Loop(model, optimizer, plan=hotloop.Plan("cuda", levers=("rms norm",)))
    ```

    **When it does not help.** If the model is compiled: the compiler fuses those operations itself.
    """

    name = "rms norm"
    order = 95
    tier = "B"
    what = "RMSNorm layers are one kernel each way"
    cost = "nothing"
    undo = "the layers' `forward` is restored"
    needs_cuda = True
    computes_the_same = True
    rule = LeverRule(
        "the model has RMSNorm layers that are written out",
        lambda facts: True,
        "H200 in bf16, a captured step of a Llama with 120 million parameters: 15.8 ms instead of 18.8",
    )

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if not has_fused_rms_norm():
            return "this PyTorch has no fused kernel for rms_norm"
        return None if any(written_out(target.model)) else "the model has no RMSNorm layer that is written out"

    def apply(self, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> Iterator[Undo]:
        for layer, eps in list(written_out(model)):
            yield replace_forward(layer, _forward, layer, eps)


def written_out(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The layers of a model that `rms_norm` can do, and what each calls its epsilon."""
    tried: dict[Any, str | None] = {}
    for layer in model.modules():
        settings = sorted((name, repr(value)) for name, value in vars(layer).items() if isinstance(value, _UNCHANGING))
        kind = (type(layer), *settings)
        if kind not in tried:
            tried[kind] = _epsilon_of(layer)
        eps = tried[kind]
        if eps is not None and _has_only_a_weight(layer):
            yield layer, eps


def _forward(layer: Any, eps: str, x: Tensor) -> Tensor:
    if layer.weight.dtype != torch.float32:  # the model was converted since
        output: Tensor = type(layer).forward(layer, x)
        return output
    y = F.rms_norm(x.float(), layer.weight.shape, layer.weight, getattr(layer, eps))
    kind = x.device.type
    return y.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else y


def _has_only_a_weight(layer: nn.Module) -> bool:
    names = [name for name, _ in layer.named_parameters()]
    weight = getattr(layer, "weight", None)
    if names != ["weight"] or weight is None or weight.dim() != 1 or weight.dtype != torch.float32:
        return False
    has_more = [*layer.children(), *layer.buffers(), *module_hooks(layer)]
    return not has_more and "forward" not in vars(layer)


def _epsilon_of(layer: nn.Module) -> str | None:
    """What a layer calls its epsilon, where it computes what `rms_norm` does: a copy is tried on a few numbers."""
    own = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
    eps = next((name for name in _EPS if isinstance(own.get(name), float)), None)
    if eps is None or type(layer).__module__.startswith("torch.") or not _has_only_a_weight(layer):
        return None
    if not all(isinstance(value, _UNCHANGING) for value in own.values()):
        return None
    probe, generator = copy(layer), torch.Generator().manual_seed(0)
    width = layer.get_parameter("weight").numel()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        for _ in range(2):
            x = torch.randn(2, width, generator=generator)
            weight = torch.randn(width, generator=generator)
            try:
                y = functional_call(probe, {"weight": weight}, (x,))
            except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):  # it takes something else
                return None
            expected = F.rms_norm(x, weight.shape, weight, own[eps])
            if not isinstance(y, Tensor) or y.shape != x.shape or not torch.allclose(y, expected, _CLOSE, _CLOSE):
                return None
    is_as_it_was = vars(probe).keys() == vars(layer).keys() and all(vars(probe)[name] == own[name] for name in own)
    return eps if is_as_it_was else None
