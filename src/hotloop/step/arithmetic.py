"""`Work`: counts the arithmetic of one forward and backward pass, operation by operation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from hotloop._torch import DispatchMode
from hotloop.values.tree import tensors_of

_RANDOM = ("rand", "normal", "bernoulli", "dropout", "uniform", "multinomial", "exponential", "philox")


class Work(DispatchMode):
    """Counts operations, the arithmetic of matmuls, convolutions and recurrences, and sums over rows; notes attention
    and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.flops = 0.0
        self.attends = False  # whether it may have called `scaled_dot_product_attention`
        self.draws = False  # whether it draws random numbers
        self.row_sums = 0  # how often it normalises rows, or adds a bias to them

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        packet = getattr(func, "overloadpacket", None)
        name = str(packet).rpartition(".")[2]
        self.draws |= any(word in name for word in _RANDOM)
        self.attends |= "attention" in name or name in ("_softmax", "_safe_softmax")  # of which it is made in fp32
        self.row_sums += name in ("native_layer_norm", "addmm")
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif ("rnn" in name or "lstm" in name or "gru" in name) and "cell" not in name:  # a cell's matmuls are counted
            self.flops += _of_recurrence(args) * (2 if "backward" in name else 1)
        return result


def _of_recurrence(args: Sequence[Any]) -> float:
    """Arithmetic of a recurrent layer: a matmul of each weight matrix with every position of its input."""
    inputs, *others = args
    if not isinstance(inputs, Tensor) or inputs.dim() not in (2, 3):
        return 0.0
    lists = [each for each in others if isinstance(each, list | tuple)]  # of weights; some kernels take them one by one
    matrices = sum(t.numel() for t in tensors_of(lists or others) if t.dim() == 2)
    return 2.0 * matrices * inputs.shape[:-1].numel()
