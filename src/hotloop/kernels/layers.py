"""Which layers of a model compute with hotloop's kernels, and how."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotloop._torch import saves_through_hooks
from hotloop.kernels.convolutions import convolved, is_awkward
from hotloop.kernels.images import GROUP, is_image, kernels_for
from hotloop.kernels.lazy import ImageRecipe, LazyImage, image_of, one_side, pooled
from hotloop.kernels.nvrtc import HALVES


def layers_to_fuse(model: nn.Module) -> list[nn.Module]:
    """The layers of a model that hotloop's kernels can take: those that nobody has derived from or replaced."""
    return [layer for layer in model.modules() if "forward" not in vars(layer) and _suits(layer)]


def fuse(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Each such layer, and what its `forward` becomes."""
    for layer in layers_to_fuse(model):
        yield layer, partial(_FORWARDS[type(layer)], layer)


def prepare(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels that a model will probably need, in processes beside whatever is done meanwhile."""
    for macros in _parts(model):
        kernels_for(device, dtype, *macros).compile_beside()


def _parts(model: nn.Module) -> set[tuple[str, ...]]:
    """The macros of these kernels. What follows what is not known: activations come before pooling, unless layers that
    stand beside one another say otherwise."""
    taken, before = set(layers_to_fuse(model)), None
    kinds = {kind for layer in model.modules() if (kind := _KINDS.get(type(layer)))} or {1}
    parts: set[tuple[str, ...]] = {(), ("KIND=0",), *((f"KIND={kind}",) for kind in kinds)}
    for layer in model.modules():
        if layer in taken and isinstance(layer, nn.GroupNorm):
            parts.add(("GROUPS",))
        if layer in taken and isinstance(layer, nn.MaxPool2d):
            none = {0} if type(before) in _FORWARDS else set()
            parts |= {(f"KIND={kind}", f"SIDE={_side_of(layer)}") for kind in kinds | none}
        before = layer
    return parts


def _suits(layer: nn.Module) -> bool:
    if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm):
        return type(layer) in _FORWARDS and _can_normalize(layer, layer.weight) and len(layer.weight) % GROUP == 0
    if type(layer) is nn.Conv2d:
        is_plain = layer.out_channels % GROUP == 0 and layer.padding_mode == "zeros"
        return is_plain and layer.bias is not None and _is_fp32(layer.bias, layer.bias)
    return type(layer) is nn.MaxPool2d and _side_of(layer) > 0


def _can_normalize(layer: nn.BatchNorm2d | nn.GroupNorm, beside: Tensor | None) -> bool:
    """Whether a layer has all that the kernels read by its address, beside a tensor; a model may change at any time."""
    read: tuple[Tensor | None, ...] = (layer.weight, layer.bias)
    if isinstance(layer, nn.BatchNorm2d):
        if layer.momentum is None:
            return False
        read += (layer.running_mean, layer.running_var)
    return beside is not None and all(_is_fp32(each, beside) for each in read)


def _is_fp32(tensor: Tensor | None, beside: Tensor) -> bool:
    return tensor is not None and tensor.dtype == torch.float32 and tensor.device == beside.device


def normalization(layer: nn.BatchNorm2d | nn.GroupNorm, batch: Tensor) -> Tensor:
    """The output of a layer, to be computed with what comes after it."""
    suits = layer.training and batch.dim() == 4 and _can_normalize(layer, batch) and not _must_be_plain()
    if suits and batch.shape[1] == len(layer.weight):
        recipe = batch.open_recipe() if isinstance(batch, LazyImage) else None
        if recipe is not None and recipe.is_shift and (isinstance(layer, nn.GroupNorm) or recipe.bias.dim() == 1):
            return LazyImage(recipe.normalized(layer))
        batch = image_of(batch)
        if type(batch) is Tensor and is_image(batch):
            return LazyImage(ImageRecipe.of_normalized(layer, batch))
    plain: Any = type(layer).forward
    output: Tensor = plain(layer, image_of(batch))
    return output


def convolution(layer: nn.Conv2d, batch: Tensor) -> Tensor:
    """The output of a layer, whose bias is to be added with what comes after it."""
    batch = image_of(batch)
    kind = batch.device.type
    in_half = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) in HALVES
    if not layer.training or not in_half or layer.bias is None or not _is_fp32(layer.bias, batch) or _must_be_plain():
        return nn.Conv2d.forward(layer, batch)
    if is_awkward(layer) and batch.dim() == 4:
        x = convolved(layer, batch, torch.get_autocast_dtype(kind), None)
    else:
        x = F.conv2d(batch, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)
    if type(x) is not Tensor or not is_image(x):
        return x + layer.bias.to(x.dtype).view(-1, 1, 1)
    return LazyImage(ImageRecipe.of(x, layer.bias))


def max_pool(layer: nn.MaxPool2d, batch: Tensor) -> Tensor:
    """The output of a layer, computed with what comes before it."""
    result = None if _must_be_plain() else pooled(batch, _side_of(layer))
    return nn.MaxPool2d.forward(layer, image_of(batch)) if result is None else result


def _must_be_plain() -> bool:
    """Whether a compiler reads along, or activations are computed again: what is lazy would leave that part."""
    return torch.compiler.is_compiling() or saves_through_hooks()


def _side_of(layer: nn.MaxPool2d) -> int:
    if layer.return_indices:
        return 0
    return one_side(layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode)


_FORWARDS: dict[Any, Callable[[Any, Tensor], Tensor]] = {
    nn.BatchNorm2d: normalization,
    nn.GroupNorm: normalization,
    nn.Conv2d: convolution,
    nn.MaxPool2d: max_pool,
}
_KINDS: dict[Any, int] = {nn.ReLU: 1, nn.LeakyReLU: 1, nn.GELU: 2, nn.SiLU: 4}
