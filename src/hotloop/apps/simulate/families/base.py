"""`Family`: what is known of the operations of one family, and the small face by which the rest asks for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from hotloop.apps.simulate._torch import autograd_again
from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import Operation, Shape
from hotloop.apps.simulate.library_memory import Constants
from hotloop.apps.simulate.need import Need
from hotloop.apps.simulate.products import Tf32, WorkPart, bytes_moved, layout_of, precision_of
from hotloop.apps.simulate.replaced import Patches

VIEW, POINTWISE = "view", "pointwise"


@dataclass(frozen=True, slots=True)
class Kind:
    """What an operation is, by its name alone."""

    base: str  # without namespace, overload and the underscore of working in place: add, _foreach_mul
    family: str
    known: bool  # whether the family was known, not taken for want of a better one
    lists: int = 0  # of tensors among its arguments
    singles: int = 0  # tensors that it must be given beside the lists
    in_place: bool = False


class Unable(Exception):
    """The host cannot compute the values of an operation."""


@dataclass(frozen=True)
class Kept:
    """What a function was given and gave, by which autograd finds its gradients."""

    operands: list[Tensor]
    outputs: list[Tensor]

    def gradients(self, of_outputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Those of the operands."""
        pairs = [
            (output, grad.to(output.dtype))
            for output, grad in zip(self.outputs, of_outputs, strict=False)
            if grad is not None and output.requires_grad
        ]
        outputs, grads = [output for output, _ in pairs], [grad for _, grad in pairs]
        with autograd_again():
            found = torch.autograd.grad(outputs, self.operands, grads, retain_graph=True, allow_unused=True)
        return [
            torch.zeros_like(operand) if grad is None else grad
            for operand, grad in zip(self.operands, found, strict=True)
        ]


@dataclass(frozen=True)
class Gradient:
    """How the backward of an operation is computed on the host, from what its forward kept."""

    kept_with: str  # the argument that the forward gave
    given: tuple[str, ...]  # the arguments that are gradients of its outputs
    arrange: Callable[[list[Tensor], dict[str, Any]], list[Any]] = lambda gradients, _: gradients

    def computed(self, kept: Kept | None, arguments: dict[str, Any]) -> list[Any]:
        if kept is None:
            raise Unable("its forward kept nothing for it")
        return self.arrange(kept.gradients([arguments[name] for name in self.given]), arguments)


Work = Callable[[Operation, Kind, Tf32], tuple[WorkPart, ...]]
Needs = Callable[[Operation, Card, Constants], tuple[Need, ...]]
Copied = Callable[[Operation], tuple[Shape, ...]]
Forward = Callable[[dict[str, Any]], tuple[list[Any], Kept | None]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is known of operations that belong together; what is not said is as for any other operation.

    Operations are named without namespace and overload; `members` and `work` leave out the underscore of working in
    place as well.
    """

    members: dict[str, str] = field(default_factory=dict)  # operations, by the curve that tells their time
    work: dict[str, Work] = field(default_factory=dict)  # what they ask of a card, by curve
    apart: dict[str, Work] = field(default_factory=dict)  # the same for single operations
    needs: dict[str, Needs] = field(default_factory=dict)  # memory that they take besides their results
    copied: dict[str, Copied] = field(default_factory=dict)  # operands that their kernels copy first
    host: dict[str, set[str]] = field(default_factory=dict)  # arguments that may, or must, stay on the host
    strict: str = ""  # those that do not take a number from the host in place of a tensor
    idle: str = ""  # those that do nothing on the device
    last_first: str = ""  # those that allocate their last result first
    whole: str = ""  # those that only a GPU has a kernel for; elsewhere PyTorch makes them of several
    shapes: dict[str, Callable[..., Any]] = field(default_factory=dict)  # their results, where PyTorch tells none
    forwards: dict[str, Forward] = field(default_factory=dict)  # their values, by what the host has in their place
    backwards: dict[str, Gradient] = field(default_factory=dict)
    install: Callable[[Patches, tuple[int, int]], None] | None = None  # lets functions choose as on a card does


def moving(
    operation: Operation,
    kind: Kind,
    size: float | None = None,
    kernels: int = 1,
    *,
    variant: str = "",
    traits: tuple[int, ...] = (),
    image: bool = False,
) -> tuple[WorkPart, ...]:
    """The work of what memory alone bounds: bytes read and written, all of them where nothing else is said."""
    size = bytes_moved(operation) if size is None else size
    layout = layout_of(operation.inputs[:1]) if image else ""
    return (WorkPart(kind.family, size, 0.0, precision_of(operation), kernels, None, layout, variant, traits),)


def rows_of(shape: Shape) -> tuple[int, ...]:
    """Rows and their width."""
    width = shape.sizes[-1] if shape.sizes else 1
    return shape.numel // max(width, 1), width


def image_of(shape: Shape) -> tuple[int, ...]:
    """Batch, channels and pixels."""
    batch, channels, *sides = (*shape.sizes, 1, 1)[: max(len(shape.sizes), 2)]
    return batch, channels, prod(sides)


def contiguous(*numbers: int) -> Copied:
    """Operands that an operation wants contiguous: channels that are last are not."""

    def copied(operation: Operation) -> tuple[Shape, ...]:
        inputs = operation.inputs
        return tuple(inputs[number] for number in numbers if number < len(inputs) and inputs[number].strides)

    return copied


def base_name(operation: Operation) -> str:
    """The name of an operation alone.

    >>> base_name(Operation("aten.addmm.default", (), ()))
    'addmm'
    """
    parts = operation.name.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def in_doubt(operation: Operation, why: str) -> Need:
    """Memory that was not measured: nothing, or up to a copy of all operands, below which nine of ten rules stay."""
    operands = sum(shape.nbytes for shape in (*operation.inputs, *operation.outputs))
    return Need(0, f"memory of {base_name(operation)}", low=0, high=operands, doubt=why)


def up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def followed(function: Callable[..., Sequence[Tensor]], *operands: Tensor) -> tuple[list[Any], Kept | None]:
    """What a function gives on the host, followed by autograd where the script learns."""
    if not torch.is_grad_enabled():
        return list(function(*operands)), None
    with autograd_again():
        leaves = [operand.detach().requires_grad_() for operand in operands]
        outputs = list(function(*leaves))
    return [output.detach().clone() for output in outputs], Kept(leaves, outputs)  # ours may be written to


def autocast(tensors: list[Tensor]) -> list[Tensor]:
    """What autocast does with the operands of an operation that it runs in lower precision."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    wanted = torch.get_autocast_dtype("cuda")
    return [t.to(wanted) if t.is_floating_point() else t for t in tensors]
