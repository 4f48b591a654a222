"""Memory that cuDNN takes for recurrent networks: by formulas that give what was measured, to the byte for most."""

from dataclasses import dataclass, replace
from math import prod

from hotloop.simulate.cards import Card
from hotloop.simulate.constants import Constants
from hotloop.simulate.events import Operation
from hotloop.simulate.need import PROCESS, RESULT, Need, together

_CELLS = {0: "rnn", 1: "rnn", 2: "lstm", 3: "gru"}  # cuDNN's modes
_GATES = {"rnn": 1, "lstm": 5, "gru": 6}  # numbers that are kept for each state
_MATRICES = {"rnn": 1, "lstm": 4, "gru": 3}  # from a state to the next
_GENERATOR = 2048 * 24  # bytes for each multiprocessor: 24 for each thread that it can run
_ALIGNED = 256


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
    generator = Need(card.sms * _GENERATOR, "generator of dropout", PROCESS, "cudnn dropout")
    return (generator, *together(workspace), replace(reserve, bytes=reserve.bytes + masks))


def rnn_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """The same workspace, once for the gradient of the input and once for that of the weights.

    At the first, the gradient of the output lies there in order, too, but not yet the gradient of the weights.
    """
    net = _net(operation)
    found = [*_in_order(operation, net), _workspace(net, constants)]
    if operation.arguments.get("batch_first"):
        before = net.itemsize * (net.steps * net.directions - net.weights)
        found.insert(0, Need(max(0, before), "gradients in order"))
    return together(found)


def _in_order(operation: Operation, net: _Net) -> list[Need]:
    """cuDNN wants the first step of all sequences first."""
    first = operation.arguments.get("batch_first")
    return [Need(net.given * net.itemsize, "input in order", ahead=0)] if first else []


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
