"""The convolutions that `calibrate_memory.py` measures: shapes of every kind.

Those of `_unequal`, `_sequences` and `_other_kernels` were added for kinds of networks that had missed or were to come:
see docs/predictions.md.
"""

import random
from collections.abc import Iterator
from itertools import product

from hotloop.apps.simulate.convolution_workspaces import Case

CASES = (
    Case(16, 3, 64, 224, 7, 2),
    Case(16, 3, 64, 112),
    Case(32, 64, 64, 56),
    Case(64, 64, 128, 56, 3, 2),
    Case(32, 128, 128, 28),
    Case(64, 256, 256, 14),
    Case(64, 512, 512, 7),
    Case(8, 32, 32, 128),
    Case(4, 96, 48, 128),
    Case(16, 320, 320, 32),
    Case(32, 128, 64, 32, 4, 2),
    Case(128, 16, 32, 32, 5),
    Case(32, 64, 256, 56, 1),
    Case(32, 256, 64, 56, 1),
    Case(32, 512, 1024, 28, 1, 2),
    Case(64, 1024, 2048, 14, 1),
    Case(64, 2048, 512, 7, 1),
    Case(32, 96, 96, 56, 7, 1, 96),
    Case(32, 144, 144, 56, 3, 2, 144),
    Case(32, 128, 128, 28, 3, 1, 32),
    Case(16, 256, 256, 14, 3, 1, 256),
    Case(2, 16, 32, 32, 3, 1, 1, 3),
    Case(4, 32, 32, 16, 3, 1, 1, 3),
    Case(1, 64, 64, 32, 3, 2, 1, 3),
)

_BYTES = 64 * 2**20  # of the larger operand in fp32, at most
_SHAPES = {  # kernel, stride: (inputs, outputs, pixels), …
    (3, 1): (
        *((32, 32, 128), (32, 32, 64), (48, 48, 64), (64, 64, 224), (64, 64, 128), (64, 64, 64), (64, 64, 32)),
        *((96, 96, 56), (128, 128, 112), (128, 128, 64), (128, 128, 32), (128, 128, 16), (192, 192, 28)),
        *((256, 256, 56), (256, 256, 32), (256, 256, 28), (256, 256, 16), (256, 256, 8), (384, 384, 14)),
        *((512, 512, 28), (512, 512, 16), (512, 512, 14), (512, 512, 8), (512, 512, 4), (1024, 1024, 16)),
        *((32, 64, 64), (64, 128, 112), (64, 128, 64), (64, 128, 32), (128, 256, 56), (128, 256, 32)),
        *((256, 512, 28), (256, 512, 16), (512, 1024, 16), (1024, 512, 32), (512, 256, 64), (256, 128, 128)),
        *((128, 64, 256), (128, 64, 32), (256, 128, 16), (192, 64, 64), (384, 128, 32), (96, 32, 64)),
        *((3, 64, 224), (3, 32, 32), (3, 64, 32), (3, 64, 64), (1, 32, 28), (1, 64, 64), (3, 128, 32)),
        *((64, 3, 64), (32, 3, 64), (64, 1, 128), (128, 3, 32)),
    ),
    (3, 2): (
        *((32, 64, 64), (64, 64, 32), (128, 128, 56), (128, 256, 28), (256, 256, 28), (256, 512, 14)),
        *((512, 512, 14), (128, 128, 32), (3, 32, 224), (1, 32, 28), (32, 64, 14), (3, 64, 64)),
    ),
    (4, 2): ((3, 64, 64), (1, 64, 32), (64, 128, 32), (128, 256, 16), (256, 512, 8), (64, 128, 64), (3, 32, 64)),
    (4, 1): ((512, 100, 4), (512, 1, 4), (512, 128, 4)),
    (2, 2): ((96, 192, 56), (192, 384, 28), (384, 768, 14), (64, 128, 128), (128, 256, 64), (256, 512, 32)),
    (4, 4): ((3, 96, 224), (3, 64, 32)),
    (16, 16): ((3, 384, 224), (3, 768, 224)),
    (7, 2): ((3, 64, 128), (3, 32, 224)),
    (5, 1): ((1, 32, 28), (32, 64, 14), (6, 16, 14), (3, 64, 64)),
    (1, 1): (
        *((64, 64, 56), (64, 64, 32), (64, 128, 64), (128, 64, 64), (256, 128, 56), (128, 512, 28), (512, 128, 28)),
        *((512, 256, 28), (256, 1024, 14), (1024, 256, 14), (1024, 512, 14), (512, 2048, 7), (2048, 512, 7)),
        *((32, 192, 56), (192, 32, 28), (320, 1280, 7), (64, 1, 128), (32, 2, 256), (64, 3, 64), (32, 3, 64)),
        *((256, 256, 16), (512, 512, 8), (128, 384, 16), (256, 768, 8)),
    ),
    (1, 2): ((64, 128, 56), (256, 512, 56), (128, 256, 28), (256, 512, 14), (1024, 2048, 14), (64, 128, 32)),
}
_GROUPED = (  # inputs, pixels, kernel, stride, groups
    *((96, 56, 7, 1, 96), (192, 28, 7, 1, 192), (384, 14, 7, 1, 384), (768, 7, 7, 1, 768), (32, 112, 3, 1, 32)),
    *((96, 112, 3, 2, 96), (192, 28, 3, 1, 192), (576, 14, 3, 2, 576), (960, 7, 3, 1, 960)),
    *((128, 56, 3, 1, 32), (256, 28, 3, 1, 32), (512, 14, 3, 1, 32), (1024, 7, 3, 1, 32)),
)


def _case(
    inputs: int,
    outputs: int,
    pixels: int,
    kernel: int,
    stride: int,
    groups: int = 1,
    size: int = _BYTES,
    most: int = 64,
) -> Case:
    """A case with a batch of the size that people take."""
    side = max(inputs * pixels**2, outputs * (pixels // stride) ** 2)
    return Case(min(most, max(2, size // (4 * side))), inputs, outputs, pixels, kernel, stride, groups)


MORE = (
    *(_case(*shape, *kernel) for kernel, shapes in _SHAPES.items() for shape in shapes),
    *(_case(inputs, inputs, *shape) for inputs, *shape in _GROUPED),
)

# cuDNN chooses by the batch, too, and by the side of the image: small and large ones of all, and sides between.
_SMALL, _LARGE = 8 * 2**20, 512 * 2**20
_WIDTHS = (16, 24, 48, 64, 96, 128, 144, 192, 256, 288, 384, 512, 576, 768)
_WORK = (2**13, 2**21)  # numbers in an image of all channels, at least and at most


def _shapes() -> Iterator[tuple[int, ...]]:
    """Inputs, outputs, pixels, kernel, stride, and groups."""
    for width, pixels in product(_WIDTHS, (6, 10, 12, 20, 24, 40, 48, 80, 96, 160)):
        yield width, width, pixels, 3, 1, 1
    for width, pixels in product((24, 32, 64, 128, 256, 512), (10, 12, 20, 24, 40, 80)):
        yield from (
            (width, 2 * width, pixels, kernel, stride, 1) for kernel, stride in ((3, 1), (3, 2), (4, 2), (2, 2))
        )
        yield 2 * width, width, pixels, 3, 1, 1
    for width, pixels in product((64, 96, 128, 256, 512), (8, 10, 12, 14, 20, 24, 40, 48)):
        yield from ((width, 4 * width, pixels, 1, 1, 1), (4 * width, width, pixels, 1, 1, 1))
        yield from (
            (width, width, pixels, 1, 1, 1),
            (width, 2 * width, pixels, 1, 2, 1),
            (width, width, pixels, 3, 2, 1),
        )
    for width, pixels in product((16, 32, 48, 64, 96, 128), (28, 40, 64, 80, 160)):
        yield from ((3, width, pixels, 3, 1, 1), (width, 3, pixels, 3, 1, 1), (3, width, pixels, 4, 2, 1))
        yield from ((3, width, pixels, 3, 2, 1), (1, width, pixels, 3, 1, 1), (width, 1, pixels, 1, 1, 1))
    for width, (pixels, kernel) in product((96, 192, 384), ((40, 7), (20, 7), (10, 7), (40, 3), (20, 5), (80, 3))):
        yield width, width, pixels, kernel, 1, width


_EARLIER = (
    *((*shape, *kernel, 1) for kernel, shapes in _SHAPES.items() for shape in shapes),
    *((inputs, inputs, *shape) for inputs, *shape in _GROUPED),
)
GRID = tuple(
    dict.fromkeys(
        _case(*shape, size=size, most=4096)
        for size in (_LARGE, _BYTES, _SMALL)
        for shape in (*_EARLIER, *_shapes())
        if _WORK[0] <= max(shape[0], shape[1]) * shape[2] ** 2 <= _WORK[1] or shape in _EARLIER
    )
)


def _any_shapes(count: int, seed: int) -> Iterator[Case]:
    """Sizes as they come: what lies between those above."""
    dice = random.Random(seed)  # noqa: S311  # nothing is secret here
    while count:
        kernel, stride = dice.choice(((3, 1), (3, 1), (3, 1), (3, 2), (1, 1), (1, 1), (1, 2), (4, 2), (2, 2), (5, 1)))
        inputs = dice.choice((3, *(dice.choice((8, 16, 32, 64)) * dice.randint(1, 16) for _ in range(5))))
        outputs = dice.choice((inputs, 2 * inputs, 4 * inputs, max(8, inputs // 2), max(8, inputs // 4)))
        pixels = stride * dice.randint(4, 112 // stride)
        batch = round(2 ** dice.uniform(1, 11))
        case = Case(batch, inputs, 64 if inputs == 3 else outputs, pixels, kernel, stride)
        size = 4 * batch * max(case.inputs * pixels**2, case.outputs * (pixels // stride) ** 2)
        if max(case.inputs, case.outputs) <= 2048 and 2**21 <= size <= 2**30:
            count -= 1
            yield case


ANY = (*_any_shapes(1000, seed=0), *_any_shapes(1400, seed=1), *_any_shapes(1200, seed=3))


def _batches() -> Iterator[Case]:
    """The shapes that most networks have, with every batch from a few images to a gigabyte."""
    for inputs, outputs, pixels, kernel, stride, groups in _EARLIER:
        side = 4 * max(inputs * pixels**2, outputs * (pixels // stride) ** 2)
        for batch in (2**power for power in range(1, 12)):
            if 2**20 <= batch * side <= 2**30:
                yield Case(batch, inputs, outputs, pixels, kernel, stride, groups)


USUAL = tuple(_batches())


def _volumes() -> Iterator[Case]:
    """Convolutions of volumes, as networks for scans have them."""
    widths = ((1, 16), (1, 32), (4, 32), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128))
    wider = ((128, 256), (256, 256), (64, 32), (96, 32), (128, 64), (192, 64), (256, 128), (384, 128), (32, 3), (32, 1))
    few = ((2, 16), (2, 32), (3, 32), (32, 2), (32, 4), (16, 4))
    for (inputs, outputs), pixels in product(widths + wider + few, (8, 16, 32, 48, 64, 96)):
        for kernel, stride in ((3, 1), (3, 2), (2, 2), (1, 1)):
            side = 4 * max(inputs * pixels**3, outputs * (pixels // stride) ** 3)
            for batch in (2, 8, 32):
                if 2**22 <= batch * side <= 2**29:
                    yield Case(batch, inputs, outputs, pixels, kernel, stride, 1, 3)


VOLUMES = tuple(_volumes())


def _unequal() -> Iterator[Case]:
    """Few channels from many and many from few, as networks that grow by a little or widen at once have them."""
    pairs = ((128, 32), (64, 16), (96, 24), (192, 48), (256, 64), (16, 160), (16, 64), (32, 256), (24, 144), (160, 320))
    for (a, b), pixels, kernel in product(pairs, (8, 16, 32, 64), (3, 1)):
        for power, (inputs, outputs) in product(range(4, 11), ((a, b), (b, a))):
            if 2**21 <= 4 * 2**power * max(a, b) * pixels**2 <= 2**30:
                yield Case(2**power, inputs, outputs, pixels, kernel)
    dice = random.Random(1)  # noqa: S311
    for _ in range(500):  # what was put together of many parts, brought back to a few channels
        yield Case(
            round(2 ** dice.uniform(4, 9)),
            32 * dice.randint(2, 32),
            dice.choice((64, 128, 256)),
            dice.choice((4, 7, 8, 14, 16, 28, 32)),
            1,
        )


UNEQUAL = tuple(_unequal())


def _sequences() -> Iterator[Case]:
    """Convolutions of one dimension, as sound and text have them, of every length; some with holes."""
    widths = ((1, 32), (1, 64), (32, 32), (64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 256))
    wider = ((80, 256), (80, 512), (256, 512), (512, 512), (512, 256), (512, 1024), (256, 1), (64, 1))
    plain = ((3, 1, 1), (1, 1, 1), (5, 1, 1), (7, 1, 1), (3, 2, 1), (4, 2, 1), (8, 4, 1), (2, 1, 1))
    holes = tuple((kernel, 1, dilation) for kernel in (2, 3) for dilation in (2, 8, 64, 512))
    for (inputs, outputs), length in product(widths + wider, (250, 1000, 4096, 16000)):
        for (kernel, stride, dilation), size in product(plain + holes, (2**22, 2**25, 2**28)):
            batch = size // (4 * max(inputs, outputs // stride) * length)
            if 2 <= batch <= 2048 and dilation * kernel < length:
                yield Case(batch, inputs, outputs, length, kernel, stride, 1, 1, dilation)


SEQUENCES = tuple(_sequences())


def _other_kernels(count: int) -> Iterator[Case]:
    """Kernels and strides that are seldom, and those with holes."""
    kinds = (
        *((5, 2, 1), (5, 2, 1), (7, 1, 1), (7, 2, 1), (6, 2, 1), (8, 4, 1), (2, 1, 1), (9, 1, 1)),
        *((3, 1, 2), (3, 1, 6)),
    )
    dice = random.Random(2)  # noqa: S311
    for _ in range(count):
        kernel, stride, dilation = dice.choice(kinds)
        inputs = dice.choice((3, 16, 32, 64, 64, 128, 128, 256, 512))
        outputs = 64 if inputs == 3 else dice.choice((inputs, 2 * inputs, max(3, inputs // 2)))
        pixels = dice.choice((16, 28, 32, 56, 64, 112, 128))
        most = 2**30 // (4 * max(inputs, outputs) * pixels**2)
        yield Case(min(2 ** dice.randint(2, 11), max(2, most)), inputs, outputs, pixels, kernel, stride, 1, 2, dilation)


OTHER_KERNELS = tuple(_other_kernels(700))


def _strided() -> Iterator[Case]:
    """Convolutions that make images smaller, of every width, and by them those that make them larger."""
    widths, sides = (16, 32, 64, 128, 256, 512), (8, 16, 32, 64, 128)
    for (kernel, stride), width, pixels in product(((3, 2), (4, 2), (2, 2), (5, 2), (1, 2)), widths, sides):
        for outputs, size in product((width, 2 * width, width // 2), (2**23, 2**26, 2**29)):
            batch = size // (4 * max(width, outputs // stride**2) * pixels**2)
            if 2 <= batch <= 4096:
                yield Case(batch, width, outputs, pixels, kernel, stride)


STRIDED = tuple(_strided())
