"""Products of matrices and vectors: cuBLAS with its workspaces, and linear layers."""

from math import gcd, prod
from typing import Any

from torch import Tensor
from torch.nn import functional

from hotloop.apps.simulate._torch import is_simulated
from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import Operation
from hotloop.apps.simulate.families.base import Family, Kind, base_name
from hotloop.apps.simulate.library_memory import Constants
from hotloop.apps.simulate.need import PROCESS, Need
from hotloop.apps.simulate.products import Product, Tf32, WorkPart, bytes_moved, precision_of
from hotloop.apps.simulate.replaced import Patches

BLAS = ("mm", "addmm", "bmm", "baddbmm", "linear", "addmv", "mv", "addbmm", "dot", "vdot", "addr", "_scaled_mm")
_LT_WORKSPACE = 2**20
_LARGE = {9, 10, 12}  # majors of capabilities that get 32 MiB


def product_of(operation: Operation, base: str) -> Product:
    """The product that a matrix operation is, whatever is added to it."""
    shapes = [shape.sizes for shape in operation.inputs]
    if base == "linear":
        left, (columns, inner) = shapes[0], shapes[1]
        return Product(1, prod(left[:-1]), columns, inner)
    left, right = shapes[1:3] if base.lstrip("_").startswith(("add", "badd")) else shapes[:2]
    inner = left[-1]
    rows = left[-2] if len(left) > 1 else 1
    columns = right[-1] if len(right) > 1 else 1
    if base == "matmul" and len(right) <= 2:  # the batch makes more rows of one product
        return Product(1, prod(left[:-1]), columns, inner)
    return Product(max(prod(left[:-2]), prod(right[:-2])), rows, columns, inner)


def _work(operation: Operation, kind: Kind, tf32: Tf32) -> tuple[WorkPart, ...]:
    """How well the rows of a product are aligned counts: vocabularies of odd sizes have slower kernels."""
    product = product_of(operation, kind.base)
    sizes = product.rows, product.columns, product.inner
    traits = (product.count, *sizes, gcd(*sizes, 8))
    precision = precision_of(operation, tf32=tf32.products)
    return (WorkPart(kind.family, bytes_moved(operation), product.flops, precision, product=product, traits=traits),)


def blas_workspace(card: Card) -> int:
    """Bytes that PyTorch gives to each handle of cuBLAS on each stream."""
    return 32 * 2**20 if card.capability[0] in _LARGE else 2 * 4096 * 1024 + 8 * 16 * 1024


def _needs(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """One workspace per thread: autograd's backward pass runs in a thread of its own, with a handle of its own.

    A product to which a bias is added is cuBLASLt's, which gets another.
    """
    thread = "backward" if operation.phase == "backward" else "main"
    found = Need(blas_workspace(card), "cuBLAS workspace", PROCESS, f"cublas {thread}")
    if base_name(operation) != "addmm" or len(operation.inputs[0].sizes) != 1:
        return (found,)
    return (found, Need(_LT_WORKSPACE, "cuBLASLt workspace", PROCESS, f"cublaslt {thread}"))


def _install(patches: Patches, _capability: tuple[int, int]) -> None:
    """To a product of what is not contiguous a bias is added in place; without data PyTorch would make another."""
    original = functional.linear

    def linear(source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        tensors = (source, weight, bias)
        if bias is None or source.dim() < 3 or source.is_contiguous() or not all(map(is_simulated, tensors)):
            return original(source, weight, bias)
        product = original(source, weight)
        return product.add_(bias.to(product.dtype))

    patches.set(functional, "linear", linear)


FAMILY = Family(
    members={
        "gemm": "mm addmm bmm baddbmm linear matmul addbmm addmv mv dot vdot _scaled_mm _addmm_activation _int_mm"
    },
    work={"gemm": _work},
    needs=dict.fromkeys(BLAS, _needs),
    install=_install,
)
