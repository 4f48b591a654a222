"""Operands that kernels put in order before they begin: copies that nobody asked for take memory and time, too."""

from hotloop.simulate.events import Operation, Shape

_CONTIGUOUS = {  # the numbers of the operands that an operation wants contiguous: channels that are last are not
    "native_layer_norm": (0,),
    "native_layer_norm_backward": (0, 1),
    "native_group_norm": (0,),
    "native_group_norm_backward": (0, 1),
    "_softmax": (0,),
    "_softmax_backward_data": (0,),
    "_log_softmax": (0,),
    "_log_softmax_backward_data": (0,),
    "embedding_dense_backward": (0,),
}
_CONVOLUTIONS = ("convolution", "_convolution", "cudnn_convolution", "cudnn_convolution_transpose")


def disordered(operation: Operation, name: str) -> tuple[Shape, ...]:
    """The operands of an operation, which is called `name`, that are copied first."""
    inputs = operation.inputs
    if name in _CONVOLUTIONS:
        return _in_another_order(*inputs[:2])
    if name == "convolution_backward":
        return _in_another_order(*inputs[1:3], inputs[0])
    which = _CONTIGUOUS.get(name, ())
    return tuple(inputs[number] for number in which if number < len(inputs) and inputs[number].strides)


def _in_another_order(x: Shape, weight: Shape, *others: Shape) -> tuple[Shape, ...]:
    """cuDNN gets all operands with their channels last where the input or the weight has them so, else none."""
    last = x.channels_last or weight.channels_last
    return tuple(each for each in (x, weight, *others) if not each.is_dense or (last and not each.either_order))
