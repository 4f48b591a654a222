"""Memory that cuDNN takes for recurrent networks: by formulas that give what was measured, to the byte for most."""

from dataclasses import dataclass, replace
from math import prod

from hotloop.simulate.cards import Card
from hotloop.simulate.constants import Constants
from hotloop.simulate.events import Operation, Shape
from hotloop.simulate.need import PROCESS, RESULT, STAGE, Need, together

_CELLS = {0: "rnn", 1: "rnn", 2: "lstm", 3: "gru"}  # cuDNN's modes
_GATES = {"rnn": 1, "lstm": 5, "gru": 6}  # numbers that are kept for each state
_MATRICES = {"rnn": 1, "lstm": 4, "gru": 3}  # from a state to the next
_GENERATOR = 2048 * 24  # bytes for each multiprocessor: 24 for each thread that it can run
_ALIGNED = 256
_OF_WEIGHTS = 3  # the number of their gradient among those that are made


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


def rnn(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """After its workspace, cuDNN keeps the gates of all steps, what goes from layer to layer, and what was dropped."""
    net = _net(operation)
    workspace = [*_in_order(operation, net), _workspace(net, constants)]
    if not operation.arguments.get("train", True):
        return together(workspace)
    numbers = net.steps * net.directions * (_GATES[net.cell] * net.layers + net.layers - 1)
    reserve = Need(numbers * net.itemsize + _ALIGNED, "RNN reserve", RESULT)
    if not net.dropped:
        return (*together(workspace), reserve)
    masks = net.steps * net.directions**2 * (net.layers - 1) // 8  # a bit for each number
    generator = Need(card.sms * _GENERATOR, "generator of dropout", PROCESS, "cudnn dropout", ahead=0)
    return (generator, *together(workspace), replace(reserve, bytes=reserve.bytes + masks))


def rnn_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
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
    if not batch_first:
        return bool(shape.strides)
    return not shape.strides or shape.strides != _by_steps(shape.sizes)


def _by_steps(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of what has its steps as the second dimension, and yet one after the other."""
    batch, _, width = sizes
    return width, batch * width, 1


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


def _net(operation: Operation) -> _Net:
    arguments, x = operation.arguments, operation.inputs[0]
    width, layers = arguments.get("hidden_size", x.sizes[-1]), arguments.get("num_layers", 1)
    rows = prod(x.sizes[:-1])
    sizes = arguments.get("batch_sizes") or ()
    batch = sizes[0] if sizes else x.sizes[0 if arguments.get("batch_first") else 1]
    return _Net(
        cell=_CELLS.get(arguments.get("mode", 2), "lstm"),
        layers=layers,
        directions=2 if arguments.get("bidirectional") else 1,
        width=width,
        inputs=x.sizes[-1],
        steps=rows * width,
        state=batch * width,
        given=x.numel,
        itemsize=x.itemsize,
        dropped=bool(arguments.get("dropout")) and layers > 1,
    )
