"""`LazyImage`: the output of a layer, computed when something uses it, in one kernel with what comes after it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotloop._torch import as_without_storage, version_of, without_overrides
from hotloop.kernels.images import (
    LARGEST_SIDE,
    NONE,
    Activation,
    FusedImage,
    PooledImage,
    Scales,
    batch_scales,
    group_scales,
    is_image,
    shift_scales,
)
from hotloop.values.tree import map_leaves


@dataclass(frozen=True, eq=False)
class ImageRecipe:
    """How an image comes about from the output of a convolution."""

    x: Tensor
    bias: Tensor  # of the normalisation, else of the convolution, which may then have a row for each image
    weight: Tensor | None = None  # of the normalisation
    shift: Tensor | None = None  # the convolution's bias where something is normalised
    scales: Scales | None = None  # of the normalisation
    residual: Tensor | None = None
    activation: Activation = NONE
    records: bool = True  # whether autograd recorded when the layer was called
    versions: tuple[int | None, int | None] = (None, None)  # of x and of the residual then

    @staticmethod
    def of(x: Tensor, bias: Tensor) -> "ImageRecipe":
        return ImageRecipe(x, bias, records=torch.is_grad_enabled(), versions=(version_of(x), None))

    @property
    def is_shift(self) -> bool:
        """Whether it is the output of a convolution with its bias, and nothing more yet."""
        return self.weight is None and self.residual is None and not self.activation.kind

    def normalized(self, layer: nn.BatchNorm2d | nn.GroupNorm) -> "ImageRecipe":
        """The recipe with the normalisation of a layer after it; running statistics change now."""
        shift = self.bias
        if isinstance(layer, nn.GroupNorm) and shift.dim() == 1:
            shift = shift.expand(self.x.shape[0], -1)
        return self._normalized(layer, shift)

    @staticmethod
    def of_normalized(layer: nn.BatchNorm2d | nn.GroupNorm, x: Tensor) -> "ImageRecipe":
        return ImageRecipe.of(x, layer.bias)._normalized(layer, None)

    def _normalized(self, layer: nn.BatchNorm2d | nn.GroupNorm, shift: Tensor | None) -> "ImageRecipe":
        with torch.no_grad():
            if isinstance(layer, nn.BatchNorm2d):
                scales = batch_scales(layer, self.x, shift)
            else:
                scales = group_scales(layer, self.x, shift)
        records = self.records and torch.is_grad_enabled()
        return replace(self, weight=layer.weight, bias=layer.bias, shift=shift, scales=scales, records=records)

    def shifted(self, by: Tensor) -> "ImageRecipe":
        """The recipe with a number for each channel, or for each image and channel, added to its bias."""
        return replace(self, bias=self.bias + by.float().flatten(0 if by.shape[0] == 1 else 1))

    def added(self, residual: Tensor) -> "ImageRecipe":
        return replace(self, residual=residual, versions=(self.versions[0], version_of(residual)))

    def computed(self, side: int = 0) -> Tensor:
        """The image, pooled where a side of windows is given, as autograd would have recorded it then."""
        residual_version = None if self.residual is None else version_of(self.residual)
        if (version_of(self.x), residual_version) != self.versions:
            raise RuntimeError(
                "a tensor was changed in place after it had been given to another layer or sum;"
                " hotloop's kernels (the lever 'kernels') read it later"
            )
        scales = self.scales if self.scales is not None else shift_scales(self.bias, self.x)
        given = (self.x, self.weight, self.bias, self.shift, self.residual, scales, self.activation, side)
        with torch.set_grad_enabled(self.records):
            return FusedImage.apply(*given)  # type: ignore[no-any-return, no-untyped-call]


class LazyImage(Tensor):
    """A tensor that is not there yet. Functions that can be part of its kernel are noted; any other gets the tensor."""

    recipe: ImageRecipe
    _image: Tensor | None

    @staticmethod
    def __new__(cls, recipe: ImageRecipe) -> "LazyImage":
        lazy: LazyImage = as_without_storage(cls, recipe.x, requires_grad=recipe.records)
        lazy.recipe = recipe
        lazy._image = None
        if recipe.records:
            with without_overrides():  # an own autograd Function that takes it for an input sends a gradient here
                lazy.register_hook(_refuse)  # type: ignore[no-untyped-call]
        return lazy

    def image(self) -> Tensor:
        """The tensor itself."""
        if self._image is None:
            self._image = self.recipe.computed()
        return self._image

    def open_recipe(self) -> ImageRecipe | None:
        """The recipe, as long as nothing has been computed."""
        return self.recipe if self._image is None else None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _TOLD_BY_SHAPE:
            with without_overrides():
                return func(*args, **kwargs)
        if func in _FUSED and args and (result := _FUSED[func](*args, **kwargs)) is not None:
            return result
        return func(*_images(args), **_images(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func}: {_PAST}")


_PAST = (
    "the output of a layer was taken past torch functions (by an own autograd Function or operator), where hotloop's"
    " kernels (the lever 'kernels') have not computed it yet"
)


def _refuse(gradient: Tensor) -> None:
    raise NotImplementedError(_PAST)


def image_of(tensor: Tensor) -> Tensor:
    """The tensor itself where it is lazy."""
    return tensor.image() if isinstance(tensor, LazyImage) else tensor


def pooled(x: Tensor, side: int) -> Tensor | None:
    """The largest of each window of an image; None where the kernels do not know how."""
    if not 2 <= side <= LARGEST_SIDE or min(x.shape[2:]) < side:
        return None
    if isinstance(x, LazyImage):
        recipe = x.open_recipe()
        if recipe is None or recipe.residual is not None or recipe.records != torch.is_grad_enabled():
            return None
        if recipe.bias.dim() == 1 and not (recipe.scales and recipe.scales.together):
            return recipe.computed(side)
        x = x.image()
    if type(x) is not Tensor or not is_image(x):
        return None
    return PooledImage.apply(x, side)  # type: ignore[no-any-return, no-untyped-call]


def one_side(kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False) -> int:
    """The side of windows that lie beside one another, or 0."""
    sides = {*_both(kernel_size), *(_both(stride) if stride else ())}
    if len(sides) > 1 or {*_both(padding)} != {0} or {*_both(dilation)} != {1} or ceil_mode:
        return 0
    return int(sides.pop())


def _both(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _activated(lazy: Any, activation: Activation, inplace: bool = False) -> Tensor | None:
    recipe = lazy.open_recipe() if isinstance(lazy, LazyImage) else None
    if recipe is None or recipe.activation.kind or activation.slope < 0:
        return None
    if recipe.residual is not None and activation.kind != 1:
        return None  # its gradient is told by the output alone
    return _changed(lazy, replace(recipe, activation=activation), inplace)


def _changed(lazy: LazyImage, recipe: ImageRecipe, inplace: bool) -> Tensor | None:
    """A lazy image with another recipe, or the same one with it."""
    records = recipe.records and torch.is_grad_enabled()
    if not inplace:
        return LazyImage(replace(recipe, records=records))
    if records != recipe.records:
        return None
    lazy.recipe = recipe
    return lazy


def _relu(lazy: Any, inplace: bool = False) -> Tensor | None:
    return _activated(lazy, Activation(1), inplace)


def _leaky_relu(lazy: Any, negative_slope: float = 0.01, inplace: bool = False) -> Tensor | None:
    return _activated(lazy, Activation(1, float(negative_slope)), inplace)


def _gelu(lazy: Any, approximate: str = "none") -> Tensor | None:
    return _activated(lazy, Activation(3 if approximate == "tanh" else 2))


def _silu(lazy: Any, inplace: bool = False) -> Tensor | None:
    return _activated(lazy, Activation(4), inplace)


def _add(one: Any, other: Any, *, alpha: Any = 1, out: Any = None, inplace: bool = False) -> Tensor | None:
    if alpha != 1 or out is not None:
        return None
    lazy, added = (one, other) if isinstance(one, LazyImage) else (other, one)
    if inplace and lazy is not one:
        return None
    recipe = lazy.open_recipe()
    if recipe is None or recipe.activation.kind or recipe.residual is not None:
        return None
    if not isinstance(added, Tensor) or added.device != recipe.x.device or not added.is_floating_point():
        return None
    if added.shape == lazy.shape:
        return _with_residual(lazy, recipe, added, inplace)
    count, channels = lazy.shape[:2]
    if recipe.is_shift and added.shape in ((count, channels, 1, 1), (1, channels, 1, 1)):
        return _changed(lazy, recipe.shifted(image_of(added)), inplace)
    return None


def _with_residual(lazy: LazyImage, recipe: ImageRecipe, added: Tensor, inplace: bool) -> Tensor | None:
    other = added.open_recipe() if isinstance(added, LazyImage) else None
    is_sum = other is not None and other.is_shift and recipe.is_shift and other.x.dtype == recipe.x.dtype
    if other is not None and is_sum and version_of(other.x) == other.versions[0]:  # of two convolutions
        summed = replace(recipe, bias=recipe.bias + other.bias, records=recipe.records or other.records)
        return _changed(lazy, summed.added(other.x), inplace)
    added = image_of(added)
    if added.dtype != recipe.x.dtype or not is_image(added):
        return None
    return _changed(lazy, recipe.added(added), inplace)


def _max_pool(
    lazy: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    side = 0 if return_indices else one_side(kernel_size, stride, padding, dilation, ceil_mode)
    return pooled(lazy, side) if side else None


_FUSED: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((F.relu, torch.relu, Tensor.relu), _relu),
    **dict.fromkeys((F.relu_, torch.relu_, Tensor.relu_), partial(_relu, inplace=True)),
    F.leaky_relu: _leaky_relu,
    F.gelu: _gelu,
    F.silu: _silu,
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), _add),
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), partial(_add, inplace=True)),
    **dict.fromkeys((torch.max_pool2d, F.max_pool2d), _max_pool),
}
_TOLD_BY_SHAPE = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point),
}


def _images(values: Any) -> Any:
    """The same values with each lazy image as a tensor."""
    return map_leaves(values, lambda leaf: leaf.image() if isinstance(leaf, LazyImage) else leaf)
