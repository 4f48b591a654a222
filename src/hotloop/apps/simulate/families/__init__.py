"""What is known of operations stands in one file for each family; the rest of the simulation asks here, by name."""

from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch

from hotloop._torch import schema_of
from hotloop.apps.simulate._torch import overload, with_cuda_kernels
from hotloop.apps.simulate.events import Operation, Shape
from hotloop.apps.simulate.families import (
    attention_kernels,
    convolution,
    elementwise,
    indexing,
    losses,
    matmul,
    normalisation,
    optimizers,
    pooling,
    recurrent,
    reduction,
)
from hotloop.apps.simulate.families.base import POINTWISE, VIEW, Family, Kind, Work
from hotloop.apps.simulate.families.optimizers import FOREACH, FUSED

_FILES = (
    matmul,
    convolution,
    attention_kernels,
    recurrent,
    normalisation,
    reduction,
    losses,
    pooling,
    indexing,
    elementwise,
)
ALL: tuple[Family, ...] = (*(file.FAMILY for file in _FILES), optimizers.FAMILY)
_MEMBERS = {name: curve for family in ALL for curve, names in family.members.items() for name in names.split()}
_WORK = {curve: work for family in ALL for curve, work in family.work.items()}
_APART = {name: work for family in ALL for name, work in family.apart.items()}
_COPIED = {name: copied for family in ALL for name, copied in family.copied.items()}
_PARTS = "depthwise conv-backward-input conv-backward-weight depthwise-backward-input depthwise-backward-weight"
# The families of the tables: parts of convolutions have curves of their own, and views take no time.
FAMILIES = tuple(sorted({*_MEMBERS.values()} - {VIEW, "conv-backward"} | {*_PARTS.split(), FOREACH, FUSED}))

NEEDS = {name: needs for family in ALL for name, needs in family.needs.items()}
HOST = {name: arguments for family in ALL for name, arguments in family.host.items()}
STRICT = frozenset(name for family in ALL for name in family.strict.split())
IDLE = frozenset(name for family in ALL for name in family.idle.split())
LAST_FIRST = frozenset(name for family in ALL for name in family.last_first.split())
WHOLE = frozenset(name for family in ALL for name in family.whole.split())
SHAPES = {name: shape for family in ALL for name, shape in family.shapes.items()}
FORWARDS = {name: forward for family in ALL for name, forward in family.forwards.items()}
BACKWARDS = {name: backward for family in ALL for name, backward in family.backwards.items()}


@lru_cache(maxsize=4096)
def kind_of(name: str) -> Kind:
    """The kind of an operation.

    >>> kind_of("aten.addmm.default").family, kind_of("aten.view.default").family, kind_of("aten.mul_.Tensor").family
    ('gemm', 'view', 'pointwise')
    """
    _, _, rest = name.partition(".")
    packet = rest.partition(".")[0] or name
    base = packet.rstrip("_") or packet
    found = overload(name)
    types = [str(argument.type) for argument in schema_of(found).arguments] if found is not None else []
    lists = sum("List[Tensor]" in kind or "List[Optional[Tensor]]" in kind for kind in types)
    family = _family(base, found)
    return Kind(base, family or POINTWISE, family is not None, lists, types.count("Tensor"), packet != base)


def _family(base: str, operator: Any) -> str | None:
    """By its name, or else by what PyTorch itself declares."""
    if base in _MEMBERS:
        return _MEMBERS[base]
    if base.startswith(("_foreach_", "_amp_foreach_")):
        return FOREACH
    if base.startswith("_fused_"):
        return FUSED
    if operator is None:
        return None
    if operator.is_view:
        return VIEW
    if torch.Tag.pointwise in operator.tags:
        return POINTWISE
    reduces = getattr(torch.Tag, "reduction", None)  # younger than the oldest torch that is supported
    if reduces is not None and reduces in operator.tags:
        return "reduction"
    return "random" if torch.Tag.nondeterministic_seeded in operator.tags else None


def work_of(kind: Kind) -> Work:
    """Who knows what operations of a kind ask of a card."""
    return _APART.get(kind.base) or _WORK[kind.family]


def disordered(operation: Operation, name: str) -> tuple[Shape, ...]:
    """The operands of an operation, which is called `name`, that its kernel copies first."""
    copied = _COPIED.get(name)
    return copied(operation) if copied is not None else ()


def left_whole() -> AbstractContextManager[None]:
    """Let PyTorch believe that there is a GPU's kernel for `WHOLE`, so that it takes none of them apart.

    Also for a number that it reads below every mode, as from the tensors in a list: a real kernel would want a driver.
    """
    return with_cuda_kernels(WHOLE | {"_local_scalar_dense"}, _nothing_computes)


def _nothing_computes(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("there is no GPU here: its operations are told, not computed")
