"""Recurrent networks: cuDNN's own, with its memory by formulas that give what was measured, and single cells."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from hotloop.apps.simulate._torch import aten, is_simulated, recurrent_functions
from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import Operation, Shape
from hotloop.apps.simulate.families.base import POINTWISE, Family, Gradient, Kept, Kind, autocast, followed
from hotloop.apps.simulate.library_memory import Constants
from hotloop.apps.simulate.need import PROCESS, RESULT, STAGE, Need, together
from hotloop.apps.simulate.products import Tf32, WorkPart, bytes_moved, precision_of
from hotloop.apps.simulate.replaced import Patches

_LAYERS = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # as cuDNN counts them
_CELLS = ("rnn", "rnn", "lstm", "gru")  # the same, without the function
_KEPT = {"rnn": 1, "lstm": 5, "gru": 6}  # numbers that are kept for each state
_MATRICES = {"rnn": 1, "lstm": 4, "gru": 3}  # from a state to the next
_GENERATOR = 2048 * 24  # bytes for each multiprocessor: 24 for each thread that it can run
_ALIGNED = 256
_OF_WEIGHTS = 3  # the number of their gradient among those that are made


# The operation that a card takes


def _install(patches: Patches, _capability: tuple[int, int]) -> None:
    functions = recurrent_functions()
    for mode, name in enumerate(_LAYERS):
        patches.set(functions, name, _by_cudnn(mode, getattr(functions, name)))


def _by_cudnn(mode: int, original: Callable[..., Any]) -> Callable[..., Any]:
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
        states = list(hidden) if isinstance(hidden, list | tuple) else [hidden]
        source, *others = autocast([source, *states, *weights])
        states, weights = others[: len(states)], others[len(states) :]
        width = weights[0].size(0) // _MATRICES[_CELLS[mode]]
        lstm = _CELLS[mode] == "lstm"
        project = states[0].size(-1) if lstm and states[0].size(-1) != width else 0
        per_layer = (4 if biases else 2) + bool(project)
        output, h, c, _, _ = aten("_cudnn_rnn")(
            source, weights, per_layer, None, states[0], states[1] if len(states) > 1 else None,
            mode, width, project, layers, first, dropout, train, both, sizes, None,
        )  # fmt: skip
        return (output, h, c) if lstm else (output, h)

    return layer


# Its results


def results(*args: Any) -> tuple[Tensor, ...]:
    """Those of `_cudnn_rnn`, with a buffer of weights that takes no room: the weights lie in it already."""
    source, _, _, _, _, c, _, hidden, project, layers, first, _, _, both, sizes, _ = args
    directions, last = 1 + both, project or hidden
    batch = sizes[0] if sizes else source.size(0 if first else 1)
    sequence = (source.size(0),) if sizes else tuple(source.size()[:2])
    shapes: list[tuple[int, ...]] = [(layers * directions, batch, last)]
    shapes += [(layers * directions, batch, hidden) if c is not None else (0,), (0,), (0,)]
    output = _sequence((*sequence, last * directions), source, transposed=first)
    return (output, *(torch.empty(shape, dtype=source.dtype, device=source.device) for shape in shapes))


def gradients(args: tuple[Any, ...], *, batch_first: bool) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
    """Those of the input, the states and the weights, which are parts of one buffer."""
    source, weights, _, _, h, c = args[:6]
    of_source = _sequence(tuple(source.size()), source, transposed=batch_first)
    states = [None if t is None else torch.empty_like(t) for t in (h, c)]
    buffer = weights[0].new_empty(sum(weight.numel() for weight in weights))
    parts = buffer.split([weight.numel() for weight in weights])
    return of_source, states, [part.view(weight.size()) for part, weight in zip(parts, weights, strict=True)]


def _sequence(sizes: tuple[int, ...], like: Tensor, *, transposed: bool) -> Tensor:
    """What a recurrent network gives: cuDNN has the first step of all sequences first, whatever the script wants."""
    if not transposed:
        return like.new_empty(sizes)
    batch, steps, *rest = sizes
    return like.new_empty((steps, batch, *rest)).transpose(0, 1)


def _gru_cell_shapes(gates: Tensor, hidden_gates: Tensor, state: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(state), state.new_empty(state.size(0), 5 * state.size(1))


def _gru_cell_gradient_shapes(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    rows, width = grad.size(0), 3 * grad.size(1)
    gates = [grad.new_empty(rows, width) for _ in range(2)]
    biases = [grad.new_empty(width) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad), *biases)


def _lstm_cell_gradient_shapes(
    grad_h: Tensor | None, grad_c: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    bias = workspace.new_empty(workspace.size(1)) if has_bias else None
    return torch.empty_like(workspace), torch.empty_like(cx), bias


# What it computes


def _work(operation: Operation, kind: Kind, tf32: Tf32, *, backward: bool) -> tuple[WorkPart, ...]:
    """Told apart by sequences at once, steps one after another over all layers, and the width of the state."""
    image, arguments = operation.inputs[0].sizes, operation.arguments
    tokens = prod(image[:-1])
    lengths = arguments.get("batch_sizes") or ()
    layers = int(arguments.get("num_layers", 1)) * (2 if arguments.get("bidirectional") else 1)
    steps = layers * (len(lengths) or image[1 if arguments.get("batch_first") else 0])
    matrices = [s for s in operation.inputs[1:] if len(s.sizes) == 2 and not (lengths and s.sizes[0] == tokens)]
    flops = 2.0 * tokens * sum(matrix.numel for matrix in matrices) * (2 if backward else 1)
    precision = precision_of(operation, tf32=tf32.cudnn)
    traits = tokens * layers // max(steps, 1), steps, int(arguments.get("hidden_size", image[-1]))
    return (WorkPart(kind.family, bytes_moved(operation), flops, precision, 2 * steps, traits=traits),)


# The memory that it takes


@dataclass(frozen=True)
class _Net:
    """A recurrent network; its numbers are counted for one direction and one layer."""

    cell: str
    layers: int
    directions: int
    width: int
    inputs: int
    steps: int  # numbers in the states of all steps
    state: int  # and of one
    given: int  # numbers in the input
    itemsize: int
    dropped: bool

    @property
    def weights(self) -> int:
        """Numbers in the weights of all layers, without biases."""
        inner = (self.layers - 1) * self.directions * self.width
        rows = _MATRICES[self.cell] * self.width * self.directions
        return rows * (self.inputs + inner + self.layers * self.width)


def _net(operation: Operation) -> _Net:
    arguments, x = operation.arguments, operation.inputs[0]
    width, layers = arguments.get("hidden_size", x.sizes[-1]), arguments.get("num_layers", 1)
    sizes = arguments.get("batch_sizes") or ()
    batch = sizes[0] if sizes else x.sizes[0 if arguments.get("batch_first") else 1]
    return _Net(
        cell=_CELLS[arguments.get("mode", 2)],
        layers=layers,
        directions=2 if arguments.get("bidirectional") else 1,
        width=width,
        inputs=x.sizes[-1],
        steps=prod(x.sizes[:-1]) * width,
        state=batch * width,
        given=x.numel,
        itemsize=x.itemsize,
        dropped=bool(arguments.get("dropout")) and layers > 1,
    )


def _needs(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """After its workspace, cuDNN keeps the gates of all steps, what goes from layer to layer, and what was dropped."""
    net = _net(operation)
    workspace = [*_in_order(operation, net), _workspace(net, constants)]
    if not operation.arguments.get("train", True):
        return together(workspace)
    numbers = net.steps * net.directions * (_KEPT[net.cell] * net.layers + net.layers - 1)
    reserve = Need(numbers * net.itemsize + _ALIGNED, "RNN reserve", RESULT)
    if not net.dropped:
        return (*together(workspace), reserve)
    masks = net.steps * net.directions**2 * (net.layers - 1) // 8  # a bit for each number
    generator = Need(card.sms * _GENERATOR, "generator of dropout", PROCESS, "cudnn dropout", ahead=0)
    return (generator, *together(workspace), replace(reserve, bytes=reserve.bytes + masks))


def _backward_needs(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """The same workspace, once for the gradient of the input and once for that of the weights.

    At the first, the gradient of the output lies there in order, too, but not yet the gradient of the weights.
    """
    net = _net(operation)
    workspace = _workspace(net, constants)
    stage = [Need(_gradient_to_order(operation, net), "gradients in order"), workspace]
    stage = [replace(need, key=STAGE, ahead=_OF_WEIGHTS) for need in stage if need.bytes]
    return (*together(_in_order(operation, net)), *stage, workspace)


def _gradient_to_order(operation: Operation, net: _Net) -> int:
    """Bytes of the gradient of the output, where it does not lie as cuDNN wants it."""
    x = operation.inputs[0]
    sizes = (*x.sizes[:-1], net.width * net.directions)
    gradient = next((each for each in reversed(operation.inputs) if each.sizes == sizes), None)
    if gradient is None:
        return 0
    return gradient.nbytes if _is_to_order(gradient, bool(operation.arguments.get("batch_first"))) else 0


def _is_to_order(shape: Shape, batch_first: bool) -> bool:
    """Whether a sequence is copied so that the first step of all comes first."""
    if not batch_first or not shape.strides:
        return batch_first or bool(shape.strides)
    batch, _, width = shape.sizes
    return shape.strides != (width, batch * width, 1)  # the steps are the second dimension, and yet the outermost


def _in_order(operation: Operation, net: _Net) -> list[Need]:
    """cuDNN wants the first step of all sequences first."""
    first = bool(operation.arguments.get("batch_first"))
    copied = _is_to_order(operation.inputs[0], first)
    return [Need(net.given * net.itemsize, "input in order", ahead=0)] if copied else []


def _workspace(net: _Net, constants: Constants) -> Need:
    """Copies of weights and inputs, gates of all steps of a layer, a few states, and what cuBLAS gets by layer."""
    both = ".both" if net.directions == 2 else ""
    of_steps, of_states = (constants.factors.get(f"{net.cell}.{name}{both}", 0) for name in ("steps", "states"))
    inputs = 1
    if net.cell == "gru" and (net.layers == 1) != (net.directions == 2):
        inputs = 2
    if net.dropped and net.directions == 1:
        of_steps += 1  # in both directions there is room for it already
    parts = net.layers * net.directions
    numbers = of_steps * net.steps + inputs * net.given + net.weights + of_states * net.state * parts
    fixed = constants.factors.get("rnn.layer", 0) * parts
    return Need(int(fixed + numbers * net.itemsize), "RNN workspace")


# Its values, on the host


def _values(of: dict[str, Any]) -> tuple[list[Any], Kept | None]:
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

    return followed(run, of["input"], *states, *weights)


def _arranged(found: list[Tensor], of: dict[str, Any]) -> list[Any]:
    source, *others = found
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

    return followed(cell, of["input_gates"], of["hidden_gates"], of["hx"], *biases)


def _lstm_cell(of: dict[str, Any]) -> tuple[list[Any], Kept | None]:
    gates = of["input_gates"] + of["hidden_gates"]
    if of["input_bias"] is not None:
        gates = gates + of["input_bias"] + of["hidden_bias"]

    def cell(all_gates: Tensor, state: Tensor) -> list[Tensor]:
        take, keep, new, show = all_gates.chunk(4, 1)
        after = keep.sigmoid() * state + take.sigmoid() * new.tanh()
        return [show.sigmoid() * after.tanh(), after]

    return followed(cell, gates, of["cx"])


def _lstm_cell_gradients(found: list[Tensor], of: dict[str, Any]) -> list[Any]:
    gates, state = found
    return [gates, state, gates.sum(0)] if of["has_bias"] else [gates, state]


FAMILY = Family(
    members={
        "rnn": "_cudnn_rnn",
        "rnn-backward": "_cudnn_rnn_backward",
        POINTWISE: "_thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell"
        " _thnn_fused_gru_cell_backward",
    },
    work={"rnn": partial(_work, backward=False), "rnn-backward": partial(_work, backward=True)},
    needs={"_cudnn_rnn": _needs, "_cudnn_rnn_backward": _backward_needs},
    host={
        "_cudnn_rnn": {"dropout_state"},
        "_pack_padded_sequence": {"lengths"},
        "_pack_padded_sequence_backward": {"batch_sizes"},
        "_pad_packed_sequence": {"batch_sizes"},
    },
    last_first="_thnn_fused_lstm_cell _thnn_fused_gru_cell",
    shapes={
        "_thnn_fused_gru_cell": _gru_cell_shapes,
        "_thnn_fused_gru_cell_backward": _gru_cell_gradient_shapes,
        "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_gradient_shapes,
    },
    forwards={"_cudnn_rnn": _values, "_thnn_fused_gru_cell": _gru_cell, "_thnn_fused_lstm_cell": _lstm_cell},
    backwards={
        "_cudnn_rnn_backward": Gradient("output", ("grad_output", "grad_hy", "grad_cy"), _arranged),
        "_thnn_fused_gru_cell_backward": Gradient("workspace", ("grad_hy",)),
        "_thnn_fused_lstm_cell_backward_impl": Gradient("workspace", ("grad_hy", "grad_cy"), _lstm_cell_gradients),
    },
    install=_install,
)
