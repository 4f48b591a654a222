"""Layers whose sizes tensor cores do not take well compute in a form that they do."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from hotloop import kernels
from hotloop._torch import recurrence
from hotloop.levers.base import Lever, LeverRule, LeverTarget, Undo, replace_forward
from hotloop.levers.kernels import KernelsLever
from hotloop.plan import Plan

LARGE_LINEAR = 2**18  # weights of a linear layer, from which on its matmul takes longer than the copies
WIDE = 64  # of a recurrent layer
RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)


class AlignedLever(Lever):
    """**What it does.** Tensor cores are fastest if the sizes of a matrix are multiples of 8, because its rows are then
    aligned in memory. A vocabulary of 50,257 words, a recurrent layer of 650 units or an image of three channels is not
    aligned, and the library chooses kernels that are half as fast or slower. This lever pads the weights of such layers
    with zeros and cuts the padding off the result. It computes convolutions as matmuls if they have fewer than 8
    channels on one side and at most 160 numbers in a window there (7x7 pixels of three channels have 147; windows that
    do not overlap may have more), or if the window covers the whole image. Depthwise convolutions, for which cuDNN
    would compile kernels for one to three seconds each, use hotloop's own kernels. The parameters keep their shapes.

    **The numbers.** Tier B: the zeros add nothing, but another kernel adds in another order. If the windows of such a
    matmul are added up in an image of few channels, they are rounded to two bytes first. The weights of a depthwise
    convolution are not rounded, and a second derivative through one is an error; the tuner then drops the lever and
    gives the reason. A recurrent layer with dropout between its layers draws other masks.

    **What it needs.** A CUDA device, bf16 or fp16, and a layer with a size that is not a multiple of 8: an `nn.Linear`
    of 262,144 weights or more; an `nn.LSTM`, `nn.GRU` or `nn.RNN` of width 64 or more without projections; an
    `nn.Conv2d` of one group that cuts images into patches; in channels_last any `nn.Conv2d` or `nn.ConvTranspose2d` of
    one group, if its windows overlap or it becomes a matmul, and a depthwise one of an even number of channels with
    windows of at most 7x7 and a stride of 1 or 2. Subclasses of these compute as before. hotloop's own kernels need
    compute capability 8.0 or later. Matmuls of windows are for [captured](graph.md) steps: launched from Python, they
    take longer than they save.

    **What it costs.** A copy of the weights in each step; of a convolution's input if it has odd channels, and of the
    output's gradient; for a matmul, memory for all windows of the input, until the backward pass if that is less than
    the output takes. All of it is small beside the layer.

    **By hand.** If you choose the size, choose a multiple of 8: 50,304 words instead of 50,257. Otherwise:

    ```python
    plan = hotloop.Plan("cuda", precision="bf16", levers=("aligned",))
    loop = hotloop.Loop(model, optimizer, loss, plan=plan)
    ```

    **When it does not help.** If the layer is a small part of the step. If the model is compiled: the compiler does the
    same for linear layers.
    """

    name = "aligned"
    order = 102
    tier = "B"
    what = "layers whose sizes are slow on tensor cores are padded with zeros or become matmuls"
    cost = "a moment"
    undo = "the layers' `forward` is restored"
    is_own_code = True
    needs_cuda = True
    rule = LeverRule(
        "a large linear or recurrent layer or a convolution has a size that is not a multiple of 8, or a convolution is"
        " a matmul or depthwise, and the step is in half precision",
        lambda facts: facts.is_heavy,
        "H200: an LSTM of 650 units over 33,278 words went from 7,270 to 11,500 sequences/s, a captured step of a DCGAN"
        " from 2.74 to 2.10 ms",
    )

    def obstacle(self, target: LeverTarget, plan: Plan) -> str | None:
        if plan.precision == "fp32":
            return "the step is in fp32"
        return None if odd_layers(target.model, plan) else "no layer has sizes that make it slow"

    def prepare(self, target: LeverTarget) -> None:
        if target.on_cuda:
            kernels.convolutions.prepare_convolutions(target.model, target.device, torch.bfloat16)

    def apply(self, model: nn.Module, optimizers: Sequence[Optimizer], plan: Plan) -> Iterator[Undo]:
        # Those that the other lever takes pad channels themselves.
        taken = set(kernels.layers.layers_to_fuse(model)) if KernelsLever.name in plan.levers else set()
        for layer in odd_layers(model, plan):
            if "forward" in vars(layer) or layer in taken:  # somebody has replaced it for a reason
                continue
            yield replace_forward(layer, _forward_of(layer, plan))


def odd_layers(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """The layers of a model that are better computed in another form under a plan."""
    return [layer for layer in model.modules() if _is_slow(layer, plan)]


def _is_slow(layer: nn.Module, plan: Plan) -> bool:
    if type(layer) is nn.Linear:
        return layer.weight.numel() >= LARGE_LINEAR and _is_odd(layer.weight.shape)
    if isinstance(layer, nn.RNNBase):
        is_plain = type(layer) in RECURRENT and layer.hidden_size >= WIDE and not layer.proj_size
        return is_plain and _is_odd((layer.input_size, layer.hidden_size))
    if plan.channels_last:
        return kernels.convolutions.is_awkward(layer)
    return plan.graph > 0 and kernels.convolutions.cuts_into_patches(layer)


def _forward_of(layer: nn.Module, plan: Plan) -> Callable[..., Any]:
    if isinstance(layer, nn.Linear):
        return partial(linear, layer)
    return partial(convolution, layer, plan.graph > 0) if kernels.convolutions.is_awkward(layer) else Recurrence(layer)


def convolution(
    layer: nn.Conv2d | nn.ConvTranspose2d, is_captured: bool, batch: Tensor, *size: Any, **options: Any
) -> Tensor:
    """The output of a layer, computed in another form where autocast is on."""
    kind = batch.device.type
    if not torch.is_autocast_enabled(kind) or batch.dim() != 4 or size or options:  # the size of its output
        plain: Any = type(layer).forward
        output: Tensor = plain(layer, batch, *size, **options)
        return output
    dtype = torch.get_autocast_dtype(kind)
    return kernels.convolutions.convolved(layer, batch, dtype, layer.bias, is_captured=is_captured)


def linear(layer: nn.Linear, batch: Tensor) -> Tensor:
    """The output of a layer, computed with sizes that are multiples of 8 where autocast is on."""
    kind = batch.device.type
    if not torch.is_autocast_enabled(kind):
        return nn.Linear.forward(layer, batch)
    dtype = torch.get_autocast_dtype(kind)
    outputs, inputs = layer.weight.shape
    weight = kernels.padded(layer.weight.to(dtype), kernels.missing(inputs), kernels.missing(outputs))
    bias = None if layer.bias is None else kernels.padded(layer.bias.to(dtype), kernels.missing(outputs))
    rows = kernels.padded(batch.to(dtype), kernels.missing(inputs))
    rows = rows.flatten(0, -2) if batch.dim() > 1 else rows
    output = F.linear(rows, weight, bias)[..., :outputs]
    return output.unflatten(0, batch.shape[:-1]) if batch.dim() > 2 else output


class Recurrence:
    """The `forward` of a recurrent layer, computed by one whose sizes are multiples of 8 where autocast is on.

    A unit whose weights are all zero has a state of zero at all times, if it begins with it: LSTM, GRU and RNN alike.
    """

    def __init__(self, layer: nn.Module) -> None:
        assert isinstance(layer, nn.RNNBase)
        self._layer = layer
        self._width = layer.hidden_size
        self._inputs, self._units = kernels.missing(layer.input_size), kernels.missing(layer.hidden_size)
        options: dict[str, Any] = {"nonlinearity": layer.nonlinearity} if isinstance(layer, nn.RNN) else {}
        kind: Any = type(layer)
        self._wide: nn.RNNBase = kind(
            layer.input_size + self._inputs,
            layer.hidden_size + self._units,
            layer.num_layers,
            bias=layer.bias,
            batch_first=layer.batch_first,
            dropout=layer.dropout,
            bidirectional=layer.bidirectional,
            device="meta",  # its weights are handed to each call
            **options,
        )

    def __call__(self, batch: Any, hx: Any = None) -> Any:
        layer = self._layer
        data = batch.data if isinstance(batch, PackedSequence) else batch
        if not torch.is_autocast_enabled(data.device.type):
            return type(layer).forward(layer, batch, hx)
        self._wide.train(layer.training)
        weights = [
            self._weight(each, of_batch=number == 0 and depth < 1 + layer.bidirectional)
            for depth, several in enumerate(layer.all_weights)  # of each layer and direction
            for number, each in enumerate(several)  # of the input, of the state; their biases
        ]
        states = None if hx is None else _each(hx, lambda state: kernels.padded(state, self._units))
        wide = kernels.padded(data, self._inputs)
        given = batch._replace(data=wide) if isinstance(batch, PackedSequence) else wide
        output, ended = recurrence(self._wide, weights, given, states)
        ended = _each(ended, lambda state: state[..., : self._width])
        if isinstance(output, PackedSequence):
            return output._replace(data=self._own(output.data)), ended
        return self._own(output), ended

    def _weight(self, weight: Tensor, *, of_batch: bool) -> Tensor:
        """A weight or bias with zeros for the units that are not there, gate by gate."""
        gates = weight.unflatten(0, (-1, self._width))
        if weight.dim() == 1:
            return kernels.padded(gates, self._units).flatten()
        if of_batch:
            return kernels.padded(gates, self._inputs, self._units).flatten(0, 1)
        parts = gates.unflatten(2, (-1, self._width))  # one for each direction of the layer below
        return kernels.padded(parts, self._units, 0, self._units).flatten(2).flatten(0, 1)

    def _own(self, output: Tensor) -> Tensor:
        """The output without the units that are not there."""
        if not self._layer.bidirectional:
            return output[..., : self._width]
        both: Tensor = output.unflatten(-1, (2, -1))
        return both[..., : self._width].flatten(-2)


def _each(states: Any, function: Any) -> Any:
    """The states of an LSTM are two, of others one."""
    return tuple(map(function, states)) if isinstance(states, tuple) else function(states)


def _is_odd(sizes: Iterable[int]) -> bool:
    return any(kernels.missing(size) for size in sizes)
