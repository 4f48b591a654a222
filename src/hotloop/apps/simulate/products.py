"""What operations ask of a card, as plain records: matrix products, and parts of work of one family each."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hotloop.apps.simulate.events import Operation, Shape

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64", "complex128": "fp64"}


@dataclass(frozen=True, slots=True)
class Product:
    """So many products of a rows × inner matrix with an inner × columns one; what is not one is seen as one.

    >>> Product(1, 2, 3, 4).flops
    48
    """

    count: int
    rows: int
    columns: int
    inner: int

    @property
    def flops(self) -> int:
        return 2 * self.count * self.rows * self.columns * self.inner


class Tf32(NamedTuple):
    """Where fp32 products may be computed in TF32; PyTorch's defaults."""

    products: bool = False
    cudnn: bool = True


@dataclass(frozen=True, slots=True)
class WorkPart:
    """A piece of work of one family, such as the gradient of a convolution's weight."""

    family: str
    bytes: float = 0.0  # read and written
    flops: float = 0.0  # of products; others are bound by memory
    precision: str = "fp32"
    kernels: int = 1
    product: Product | None = None
    layout: str = ""  # of images: channels_last, or contiguous
    variant: str = ""  # finer than the family: what kernel it is, such as the normalisation over layers or batches
    traits: tuple[int, ...] = ()  # sizes that tell how well it goes: operations with like ones go alike


def precision_of(operation: Operation, *, tf32: bool = False) -> str:
    """The precision in which an operation is computed; `tf32` says whether products in fp32 may be.

    >>> precision_of(Operation("aten.mm.default", (Shape((2, 2), "float32", 4),), ()), tf32=True)
    'tf32'
    """
    for shape in (*operation.inputs, *operation.outputs):
        if shape.dtype == "float32":
            return "tf32" if tf32 else "fp32"
        if shape.dtype.startswith("float8"):
            return "fp8"
        if shape.dtype in _PRECISIONS:
            return _PRECISIONS[shape.dtype]
    return "fp32"


def layout_of(shapes: Iterable[Shape]) -> str:
    """The memory format of images."""
    return "channels_last" if any(shape.channels_last for shape in shapes) else "contiguous"


def bytes_of(shapes: Iterable[Shape]) -> int:
    """Those on the device."""
    return sum(shape.nbytes for shape in shapes if shape.device == "cuda")


def bytes_moved(operation: Operation) -> int:
    """Bytes of all operands and results."""
    return bytes_of(operation.inputs) + bytes_of(operation.outputs)
