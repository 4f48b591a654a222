"""Operations that only a GPU has, by what the host has in their place."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotloop.simulate.operations import facts, named

_LAYERS = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # as cuDNN counts them
_AUTOGRAD = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)


class Unable(Exception):
    """The host cannot compute the values of an operation."""


@dataclass(frozen=True)
class Kept:
    """What a function was given and gave, by which autograd finds its gradients."""

    operands: list[Tensor]
    outputs: list[Tensor]

    def gradients(self, of_outputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Those of the operands."""
        pairs = [
            (output, grad.to(output.dtype))
            for output, grad in zip(self.outputs, of_outputs, strict=False)
            if grad is not None and output.requires_grad
        ]
        with _autograd():
            found = torch.autograd.grad(
                [output for output, _ in pairs],
                self.operands,
                [grad for _, grad in pairs],
                retain_graph=True,
                allow_unused=True,
            )
        return [
            torch.zeros_like(operand) if grad is None else grad
            for operand, grad in zip(self.operands, found, strict=True)
        ]


@dataclass(frozen=True)
class Gradient:
    """How the backward of such an operation is found from what its forward kept."""

    kept_with: str  # the argument that the forward gave
    given: tuple[str, ...]  # the arguments that are gradients of its outputs
    arrange: Callable[[list[Tensor], dict[str, Any]], list[Any]] = lambda gradients, _: gradients

    def computed(self, kept: Kept | None, arguments: dict[str, Any]) -> list[Any]:
        if kept is None:
            raise Unable("its forward kept nothing for it")
        return self.arrange(kept.gradients([arguments[name] for name in self.given]), arguments)


Forward = Callable[[dict[str, Any]], tuple[list[Any], Kept | None]]


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, with None for those that were left out."""
    return dict.fromkeys(facts(func).names) | dict(named(func, args, kwargs))


def _followed(function: Callable[..., Sequence[Tensor]], *operands: Tensor) -> tuple[list[Any], Kept | None]:
    """What a function gives, followed by autograd where the script learns."""
    if not torch.is_grad_enabled():
        return list(function(*operands)), None
    with _autograd():
        leaves = [operand.detach().requires_grad_() for operand in operands]
        outputs = list(function(*leaves))
    return [output.detach().clone() for output in outputs], Kept(leaves, outputs)  # ours may be written to


@contextmanager
def _autograd() -> Iterator[None]:
    """Autograd for what is called here: the operations of a device are called below it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def _attention(of: dict[str, Any]) -> tuple[list[Any], Kept | None]:
    bias = of.get("attn_bias")

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        grouped = query.size(1) != key.size(1)
        chance, causal = of["dropout_p"] or 0.0, bool(of["is_causal"])
        return [
            torch._C._nn.scaled_dot_product_attention(
                query, key, value, mask, chance, causal, scale=of["scale"], enable_gqa=grouped
            )
        ]

    return _followed(attend, of["query"], of["key"], of["value"], *([] if bias is None else [bias]))


def _recurrent(of: dict[str, Any]) -> tuple[list[Any], Kept | None]:
    name, weights = _LAYERS[of["mode"]], of["weight"]
    states = [of["hx"]] if of["cx"] is None else [of["hx"], of["cx"]]
    biases = of["weight_stride0"] >= 4
    settings = (biases, of["num_layers"], of["dropout"], of["train"], of["bidirectional"])
    layer = getattr(torch.ops.aten, name)

    def run(source: Tensor, *others: Tensor) -> list[Tensor]:
        hidden = list(others[: len(states)]) if name == "lstm" else others[0]
        parameters = list(others[len(states) :])
        if of["batch_sizes"]:
            return list(layer.data(source, torch.tensor(of["batch_sizes"]), hidden, parameters, *settings))
        return list(layer.input(source, hidden, parameters, *settings, of["batch_first"]))

    return _followed(run, of["input"], *states, *weights)


def _recurrent_gradients(gradients: list[Tensor], of: dict[str, Any]) -> list[Any]:
    source, *others = gradients
    states = [others[0], source.new_empty(0) if of["cx"] is None else others[1]]
    return [source, *states, others[1 if of["cx"] is None else 2 :]]


def _gru_cell(of: dict[str, Any]) -> tuple[list[Any], Kept | None]:
    biases = [] if of["input_bias"] is None else [of["input_bias"], of["hidden_bias"]]

    def cell(gates: Tensor, hidden_gates: Tensor, state: Tensor, *added: Tensor) -> list[Tensor]:
        ours = (gates + added[0] if added else gates).chunk(3, 1)
        theirs = (hidden_gates + added[1] if added else hidden_gates).chunk(3, 1)
        reset, update = (ours[0] + theirs[0]).sigmoid(), (ours[1] + theirs[1]).sigmoid()
        new = (ours[2] + reset * theirs[2]).tanh()
        return [new + update * (state - new)]

    return _followed(cell, of["input_gates"], of["hidden_gates"], of["hx"], *biases)


def _lstm_cell(of: dict[str, Any]) -> tuple[list[Any], Kept | None]:
    gates = of["input_gates"] + of["hidden_gates"]
    if of["input_bias"] is not None:
        gates = gates + of["input_bias"] + of["hidden_bias"]

    def cell(all_gates: Tensor, state: Tensor) -> list[Tensor]:
        take, keep, new, show = all_gates.chunk(4, 1)
        after = keep.sigmoid() * state + take.sigmoid() * new.tanh()
        return [show.sigmoid() * after.tanh(), after]

    return _followed(cell, gates, of["cx"])


def _lstm_cell_gradients(gradients: list[Tensor], of: dict[str, Any]) -> list[Any]:
    gates, state = gradients
    return [gates, state, gates.sum(0)] if of["has_bias"] else [gates, state]


def _batch_norm(of: dict[str, Any]) -> tuple[list[Any], None]:
    statistics = (of["running_mean"], of["running_var"], of["training"], of["exponential_average_factor"])
    return list(torch.native_batch_norm(of["input"], of["weight"], of["bias"], *statistics, of["epsilon"])), None


def _batch_norm_backward(of: dict[str, Any]) -> tuple[list[Any], None]:
    saved = (of["running_mean"], of["running_var"], of["save_mean"], of["save_var"])
    wanted = [True, True, True]
    found = torch.ops.aten.native_batch_norm_backward(
        of["grad_output"], of["input"], of["weight"], *saved, True, of["epsilon"], wanted
    )
    return list(found), None


def _rms_norm(of: dict[str, Any]) -> tuple[list[Any], Kept | None]:
    def norm(source: Tensor, weight: Tensor | None = None) -> list[Tensor]:
        return [torch.rms_norm(source, of["normalized_shape"], weight, of["eps"])]

    return _followed(norm, of["input"], *([] if of["weight"] is None else [of["weight"]]))


def _softmax(function: Callable[..., Tensor]) -> Forward:
    """With its result in single precision already, which only a GPU is asked for."""
    return lambda of: ([function(of["self"], of["dim"], False)], None)


def _softmax_backward(function: Callable[..., Tensor]) -> Forward:
    return lambda of: ([function(of["grad_output"], of["output"], of["dim"], of["grad_output"].dtype)], None)


FORWARDS: dict[str, Forward] = {
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_cudnn_rnn": _recurrent,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "cudnn_batch_norm": _batch_norm,
    "cudnn_batch_norm_backward": _batch_norm_backward,
    "_fused_rms_norm": _rms_norm,
    "_softmax": _softmax(torch._softmax),
    "_log_softmax": _softmax(torch._log_softmax),
    "_softmax_backward_data": _softmax_backward(torch._softmax_backward_data),
    "_log_softmax_backward_data": _softmax_backward(torch._log_softmax_backward_data),
}
BACKWARDS: dict[str, Gradient] = {
    "_scaled_dot_product_flash_attention_backward": Gradient("out", ("grad_out",)),
    "_scaled_dot_product_efficient_attention_backward": Gradient("out", ("grad_out_",)),
    "_scaled_dot_product_cudnn_attention_backward": Gradient("out", ("grad_out",)),
    "_cudnn_rnn_backward": Gradient("output", ("grad_output", "grad_hy", "grad_cy"), _recurrent_gradients),
    "_fused_rms_norm_backward": Gradient("rstd", ("grad_out",)),
    "_thnn_fused_gru_cell_backward": Gradient("workspace", ("grad_hy",)),
    "_thnn_fused_lstm_cell_backward_impl": Gradient("workspace", ("grad_hy", "grad_cy"), _lstm_cell_gradients),
}
