"""Convolutions as matmuls compute what PyTorch's compute."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hotloop.kernels import convolutions
from hotloop.kernels.convolutions import convolved, is_awkward
from hotloop.kernels.patches import Windows

CLOSE = {"rtol": 0.03, "atol": 0.03}  # in bf16, of numbers around 1


class ReferencePatches:
    """What the kernels compute, in PyTorch's operations, so that everything around them can be tried anywhere."""

    @staticmethod
    def rows(images: Tensor, windows: Windows) -> Tensor:
        lies: Any = windows.geometry
        unfolded = F.unfold(images.float(), lies.size, lies.dilation, lies.padding, lies.stride)
        numbers = unfolded.unflatten(1, (windows.shape[1], -1)).permute(0, 3, 2, 1).flatten(2).flatten(0, 1)
        return F.pad(numbers, (0, windows.length - numbers.shape[1]))

    @classmethod
    def patches(cls, images: Tensor, windows: Windows, dtype: torch.dtype) -> Tensor:
        return cls.rows(images, windows).to(dtype)

    @classmethod
    def folded(cls, rows: Tensor, windows: Windows, dtype: torch.dtype) -> Tensor:
        images = torch.zeros(windows.shape, requires_grad=True)
        (folded,) = torch.autograd.grad(cls.rows(images, windows), images, rows.float(), create_graph=True)
        return folded.to(dtype).contiguous(memory_format=torch.channels_last)


@pytest.fixture(scope="module")
def on_a_cpu() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolutions, "patches", ReferencePatches.patches)
        patch.setattr(convolutions, "folded", ReferencePatches.folded)
        patch.setattr(convolutions, "can_be_patches", lambda *_: True)
        yield


def compare(layer: Any, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    """Outputs, gradients, and derivatives of gradients, beside those of the layer itself in fp32."""
    assert is_awkward(layer)
    with torch.no_grad():
        for each in (*layer.parameters(), x):
            each.copy_(each.to(dtype))
    x.requires_grad_()
    expected, found = layer(x), convolved(layer, x, dtype, layer.bias)
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    together = torch.channels_last
    if min(layer.in_channels, layer.out_channels) > 1:  # else PyTorch takes it for either
        assert found.is_contiguous(memory_format=together) == expected.is_contiguous(memory_format=together)
    torch.testing.assert_close(found.float(), expected, **CLOSE)
    weights = torch.randn_like(expected).to(dtype)
    given = [x, *layer.parameters()]
    first, second = (torch.autograd.grad(out.to(dtype), given, weights, create_graph=True) for out in (expected, found))
    for a, b in zip(first, second, strict=True):
        scale = a.detach().abs().max() + 1e-6
        torch.testing.assert_close(b.float() / scale, a / scale, **CLOSE)
    slopes = [torch.autograd.grad(each[0].float().square().sum(), layer.weight)[0] for each in (first, second)]
    scale = slopes[0].abs().max() + 1e-6
    torch.testing.assert_close(slopes[1] / scale, slopes[0] / scale, **CLOSE)


def a_layer(kind: str, size: tuple[int, int], narrow: int, stride: int, padding: int, dilation: int) -> Any:
    torch.manual_seed(0)
    bias = (size[0] + narrow) % 2 == 0
    options: Any = {"stride": stride, "padding": padding, "dilation": dilation, "bias": bias}
    if kind == "transposed":
        return nn.ConvTranspose2d(16, narrow, size, **options)
    if kind.startswith("few in"):
        return nn.Conv2d(narrow, 64 if kind == "few in, many out" else 16, size, **options)
    return nn.Conv2d(16, narrow, size, **options | {"stride": 1})


layers = {
    "kind": st.sampled_from(["transposed", "few in", "few in, many out", "few out"]),
    "size": st.tuples(st.integers(2, 4), st.integers(2, 4)),
    "narrow": st.integers(1, 4),
    "stride": st.integers(1, 3),
    "padding": st.integers(0, 1),
    "dilation": st.integers(1, 2),
}


@pytest.mark.usefixtures("on_a_cpu")
@given(together=st.booleans(), **layers)
def test_few_numbers_in_a_window(together: bool, **chosen: Any) -> None:
    kept = torch.channels_last if together else torch.contiguous_format
    layer = a_layer(**chosen).to(memory_format=kept)
    compare(layer, torch.randn(2, layer.in_channels, 9, 8).to(memory_format=kept))


@given(together=st.booleans(), channels=st.tuples(st.integers(1, 9), st.integers(1, 9)), bias=st.booleans())
def test_one_window_is_all_of_the_image(together: bool, channels: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    kept = torch.channels_last if together else torch.contiguous_format
    for layer, x in (
        (nn.Conv2d(*channels, (3, 4), bias=bias), torch.randn(2, channels[0], 3, 4)),
        (nn.ConvTranspose2d(*channels, (3, 4), bias=bias), torch.randn(2, channels[0], 1, 1)),
    ):
        compare(layer.to(memory_format=kept), x.to(memory_format=kept))


@pytest.mark.gpu
@settings(max_examples=30)  # each geometry is compiled
@given(dtype=st.sampled_from([torch.bfloat16, torch.float16]), together=st.booleans(), **layers)
def test_on_a_gpu_few_numbers_in_a_window(dtype: torch.dtype, together: bool, **chosen: Any) -> None:
    kept = torch.channels_last if together else torch.contiguous_format
    layer = a_layer(**chosen).cuda().to(memory_format=kept)
    compare(layer, torch.randn(5, layer.in_channels, 13, 12, device="cuda").to(memory_format=kept), dtype)


@pytest.mark.gpu
def test_on_a_gpu_the_same_input_gives_the_same_bits() -> None:
    layer = nn.Conv2d(3, 64, 4, 2, 1).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(32, 3, 64, 64, device="cuda", requires_grad=True)
    seen = []
    for _ in range(3):
        out = convolved(layer, x, torch.bfloat16, layer.bias)
        seen.append((out, *torch.autograd.grad(out.float().square().sum(), [x, layer.weight])))
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))
    assert seen[0][1].dtype == torch.float32
