"""Convolutions in the form that suits them best: a matmul where few numbers go into it, own kernels where each channel
is by itself, else channels in multiples of 8, zeros beyond the last one."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from hotloop.kernels import MULTIPLE, missing, padded
from hotloop.kernels.depthwise import can_be_depthwise, depthwise, is_depthwise, prepare_depthwise
from hotloop.kernels.lazy import image_of
from hotloop.kernels.nvrtc import why_no_kernels
from hotloop.kernels.patches import Geometry, Windows, can_be_patches, folded, patches, product

FEW_NUMBERS = 160  # numbers in a window of 7x7 pixels of three colours, and a little more

Convolution = nn.Conv2d | nn.ConvTranspose2d


def is_awkward(layer: nn.Module) -> "TypeGuard[Convolution]":
    """Whether a layer is a convolution that may be faster in another form."""
    return is_depthwise(layer) or _is_odd(layer)


def _is_odd(layer: nn.Module) -> "TypeGuard[Convolution]":
    """Whether it has sizes that tensor cores do not take well, or is a matmul."""
    if type(layer) not in (nn.Conv2d, nn.ConvTranspose2d):
        return False
    assert isinstance(layer, Convolution)
    is_plain = layer.groups == 1 and layer.padding_mode == "zeros"
    return is_plain and (_has_odd_channels(layer) or _has_few_numbers(layer) or _may_be_whole(layer))


def convolved(
    layer: Convolution, batch: Tensor, dtype: torch.dtype, bias: Tensor | None, *, is_captured: bool = True
) -> Tensor:
    """The output of such a layer for images, computed in a half precision, with the bias that is given.

    In a step that is not captured, patches take longer to launch than they save.
    """
    batch = image_of(batch)
    if batch.shape[1] != layer.in_channels or batch.device != layer.weight.device:
        return _plain(layer, batch, layer.weight, bias)  # PyTorch says what is wrong
    if is_depthwise(layer):
        if can_be_depthwise(layer, batch, dtype):
            return depthwise(layer, batch, dtype, bias)
        return _plain(layer, batch, layer.weight, bias)
    if _may_be_whole(layer) and _is_whole(layer, batch):
        return _in_format(_whole(layer, batch.to(dtype), bias), layer, batch)
    if is_captured and _has_few_numbers(layer):
        windows = _windows(layer, batch.shape)
        if can_be_patches(batch, dtype, windows):
            return _in_format(_by_patches(layer, batch, windows, dtype, bias), layer, batch)
    if _has_odd_channels(layer):
        return _with_zeros(layer, batch.to(dtype), bias)
    return _plain(layer, batch, layer.weight, bias)


def cuts_into_patches(layer: nn.Module) -> bool:
    """Whether a layer is a convolution whose windows lie beside one another, as those that cut images for a
    transformer: a matmul in any memory format."""
    return _is_odd(layer) and _has_few_numbers(layer) and not _overlaps(layer)


def _has_few_numbers(layer: Convolution) -> bool:
    """Whether one side of a layer has few channels, and a window there so few numbers that a matrix of all windows is
    worth its memory. Where they do not overlap, it takes no more than the images."""
    if isinstance(layer.padding, str) or any(layer.output_padding):
        return False
    narrow, wide = sorted((layer.in_channels, layer.out_channels))
    if narrow >= MULTIPLE or missing(wide) or (narrow * _area(layer) > FEW_NUMBERS and _overlaps(layer)):
        return False
    if isinstance(layer, nn.ConvTranspose2d):
        return _gives_few(layer)
    return not _gives_few(layer) or (set(layer.stride) == {1} and min(_padding_seen_from_output(layer)) >= 0)


def prepare_convolutions(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Compile what a model's convolutions will probably need, beside whatever is done meanwhile."""
    by_channel = [layer for layer in model.modules() if is_depthwise(layer)]
    few = [layer for layer in model.modules() if _is_odd(layer) and _has_few_numbers(layer)]
    if (few or by_channel) and not why_no_kernels(device):
        prepare_depthwise(by_channel, device, dtype)
        for geometry in set(map(_geometry, few)):
            geometry.kernels(device, dtype).compile_beside()


def _has_odd_channels(layer: Convolution) -> bool:
    """Whether zeros beyond its channels help. They make it slower where windows do not overlap."""
    return _overlaps(layer) and bool(missing(layer.in_channels) or missing(layer.out_channels))


def _may_be_whole(layer: Convolution) -> bool:
    """Whether one window may be all of an image. With a stride there are more of them, or it would not be there."""
    is_close = {*layer.stride, *layer.dilation} == {1} and {*layer.padding, *layer.output_padding} == {0}
    return is_close and _area(layer) > 1


def _is_whole(layer: Convolution, batch: Tensor) -> bool:
    return tuple(batch.shape[2:]) == ((1, 1) if isinstance(layer, nn.ConvTranspose2d) else layer.kernel_size)


def _whole(layer: Convolution, batch: Tensor, bias: Tensor | None) -> Tensor:
    """One window is all of the image: a linear layer."""
    weight = layer.weight.to(batch.dtype).permute(0, 2, 3, 1).flatten(1)
    rows = batch.permute(0, 2, 3, 1).flatten(1)
    is_transposed = isinstance(layer, nn.ConvTranspose2d)
    size = layer.kernel_size if is_transposed else (1, 1)
    shape = torch.Size((len(batch), layer.out_channels, *size))
    return _shifted(product(rows, weight if is_transposed else weight.T, shape), bias)


def _windows(layer: Convolution, shape: Sequence[int]) -> Windows:
    """Those on the side with few channels: the images of this shape that go in, or those that come out."""
    geometry = _geometry(layer)
    return geometry.under(shape) if _gives_few(layer) else geometry.on(shape)


def _geometry(layer: Convolution) -> Geometry:
    """How windows lie on the side with few channels."""
    assert not isinstance(layer.padding, str)
    padding: tuple[int, ...] = layer.padding
    if _gives_few(layer) and isinstance(layer, nn.Conv2d):
        padding = _padding_seen_from_output(layer)
    few = min(layer.in_channels, layer.out_channels)
    return Geometry(few, tuple(layer.kernel_size), tuple(layer.stride), tuple(padding), tuple(layer.dilation))


def _by_patches(layer: Convolution, batch: Tensor, windows: Windows, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The matrix of all windows on the input, times the weights; or the input times the weights, which is that of all
    windows on the output."""
    weight = layer.weight.to(dtype)
    if _gives_few(layer) and isinstance(layer, nn.Conv2d):
        weight = weight.transpose(0, 1).flip(2, 3)  # seen from the output, windows lie the other way round
    weight = weight.permute(0, 2, 3, 1).flatten(1)  # a row for each channel of the side with many
    weight = padded(weight, missing(weight.shape[1]))
    if _gives_few(layer):
        rows = batch.to(dtype).permute(0, 2, 3, 1).reshape(-1, layer.in_channels)
        return _shifted(folded(rows @ weight, windows, dtype), bias)
    shape = torch.Size((len(batch), layer.out_channels, *windows.places))
    if windows.length > layer.out_channels:  # the matrix is larger than the output: it is made twice and not kept
        image: Tensor = _OfPatches.apply(batch, weight.T, windows, shape)  # type: ignore[no-untyped-call]
        return _shifted(image, bias)
    return _shifted(product(patches(batch, windows, dtype), weight.T, shape), bias)


class _OfPatches(Function):
    """The matmul of all windows and a matrix, of which the images are kept for the backward pass."""

    @staticmethod
    def forward(images: Tensor, matrix: Tensor, windows: Windows, shape: torch.Size) -> Tensor:
        return product(patches(images, windows, matrix.dtype), matrix, shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        images, matrix, ctx.windows, _ = inputs
        ctx.save_for_backward(images, matrix)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        images, matrix = ctx.saved_tensors
        flat = gradient.permute(0, 2, 3, 1).reshape(ctx.windows.rows, -1)
        of_images = folded(flat @ matrix.T, ctx.windows, images.dtype) if ctx.needs_input_grad[0] else None
        of_matrix = patches(images, ctx.windows, matrix.dtype).T @ flat if ctx.needs_input_grad[1] else None
        return of_images, of_matrix, None, None


def _shifted(image: Tensor, bias: Tensor | None) -> Tensor:
    return image if bias is None else image + bias.to(image.dtype).view(-1, 1, 1)


def _gives_few(layer: Convolution) -> bool:
    """Whether the side with few channels is the output."""
    return layer.out_channels < layer.in_channels


def _padding_seen_from_output(layer: Convolution) -> tuple[int, ...]:
    """That of the windows in which an input pixel of a convolution with stride 1 counts."""
    assert not isinstance(layer.padding, str)
    geometry = zip(layer.kernel_size, layer.padding, layer.dilation, strict=True)
    return tuple(apart * (length - 1) - more for length, more, apart in geometry)


def _with_zeros(layer: Convolution, batch: Tensor, bias: Tensor | None) -> Tensor:
    """With zeros beyond the last channel, of which what belongs to them is cut off again."""
    inputs, outputs = missing(layer.in_channels), missing(layer.out_channels)
    is_transposed = isinstance(layer, nn.ConvTranspose2d)
    weight = padded(layer.weight.to(batch.dtype), 0, 0, *((outputs, inputs) if is_transposed else (inputs, outputs)))
    bias = None if bias is None else padded(bias.to(batch.dtype), outputs)
    output = _plain(layer, padded(batch, 0, 0, inputs), weight, bias)
    if not outputs:
        return output
    together = output.is_contiguous(memory_format=torch.channels_last)
    own = output[:, : layer.out_channels]
    return own.contiguous(memory_format=torch.channels_last if together else torch.contiguous_format)


def _plain(layer: Convolution, batch: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    is_transposed = isinstance(layer, nn.ConvTranspose2d)
    convolve: Any = F.conv_transpose2d if is_transposed else F.conv2d
    more: dict[str, Any] = {"output_padding": layer.output_padding} if is_transposed else {}
    output: Tensor = convolve(
        batch,
        weight,
        bias,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        groups=layer.groups,
        **more,
    )
    return output


def _overlaps(layer: Convolution) -> bool:
    return any(size > stride for size, stride in zip(layer.kernel_size, layer.stride, strict=True))


def _area(layer: Convolution) -> int:
    height, width = layer.kernel_size
    return height * width


def _in_format(image: Tensor, layer: Convolution, batch: Tensor) -> Tensor:
    """An image whose channels lie together, or apart where those of the batch and the weights do."""
    formats = {_lies_together(each) for each in (batch, layer.weight)}
    return image.contiguous() if False in formats and True not in formats else image


def _lies_together(tensor: Tensor) -> bool | None:
    """Whether the channels of a pixel lie together; None where both can be said, as of one channel."""
    together, apart = tensor.is_contiguous(memory_format=torch.channels_last), tensor.is_contiguous()
    return None if together and apart else together
