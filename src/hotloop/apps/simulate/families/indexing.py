"""Embeddings, gathering and scattering by indices."""

from hotloop.apps.simulate.cards import Card
from hotloop.apps.simulate.events import Operation
from hotloop.apps.simulate.families.base import Family, Kind, base_name, contiguous, moving, up
from hotloop.apps.simulate.library_memory import Constants
from hotloop.apps.simulate.need import Need, together
from hotloop.apps.simulate.products import Tf32, WorkPart, bytes_of

_FEW = 3072  # indices that are added up without sorting
_PUT = ("index_put", "index_put_", "_unsafe_index_put")


def _variant(operation: Operation, kind: Kind) -> str:
    if operation.arguments.get("accumulate"):
        return "added"
    return "embedding" if kind.base.startswith("embedding") else ""


def _gather(operation: Operation, kind: Kind, _tf32: Tf32) -> tuple[WorkPart, ...]:
    size = bytes_of(operation.inputs[1:]) + 2.0 * bytes_of(operation.outputs)
    variant = _variant(operation, kind)
    traits: tuple[int, ...] = ()
    if variant == "embedding":
        table, rows = operation.inputs[0], operation.outputs[0]
        traits = table.sizes[0], rows.numel // max(rows.sizes[-1], 1), rows.sizes[-1]
    return moving(operation, kind, size, variant=variant, traits=traits)


def _scatter(operation: Operation, kind: Kind, _tf32: Tf32) -> tuple[WorkPart, ...]:
    variant = _variant(operation, kind)
    traits: tuple[int, ...] = ()
    if variant == "embedding":
        table, rows = operation.outputs[0], operation.inputs[0]
        traits = table.sizes[0], rows.numel // max(rows.sizes[-1], 1), rows.sizes[-1]
    given, *others = operation.inputs
    if kind.base.endswith("backward"):  # cleared, then added to in the order of the sorted indices
        indices = bytes_of(others[:1])
        size = bytes_of(operation.outputs) + 3.0 * given.nbytes + 8.0 * indices
        return moving(operation, kind, size, 10 if indices / 8 > _FEW else 2, variant=variant, traits=traits)
    size = 3.0 * bytes_of(others) + (0 if operation.name.split(".")[1].endswith("_") else 2 * given.nbytes)
    return moving(operation, kind, size, 2, variant=variant, traits=traits)


def _embedding_backward(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """Indices are sorted, and rows that come often are added up in fp32 in parts of ten, their width a whole warp's."""
    gradient, indices = operation.inputs[:2]
    number = indices.numel
    if number <= _FEW or not operation.outputs:
        return ()
    parts = number // 10 + min(number, operation.outputs[0].sizes[0])
    width = up(gradient.sizes[-1], 32)
    found = [Need(8 * number, "sorted indices")] * 5 + [Need(8 * parts, "parts of an embedding")]
    return together([*found, Need(4 * width * parts, "embedding gradient in fp32")])


def _index_put(operation: Operation, card: Card, constants: Constants) -> tuple[Need, ...]:
    """Indices are sorted; values that do not begin with the dimensions of the indices are put in that order."""
    if not operation.arguments.get("accumulate") or len(operation.inputs) < 3:
        return ()
    *indices, values = operation.inputs[1:]
    first = max(indices, key=lambda each: each.numel)
    found = [Need(8 * first.numel, "sorted indices")] * 3
    if values.sizes[: len(first.sizes)] != first.sizes:
        found.append(Need(values.nbytes, "values in order"))
    return together(found)


def adds_gradients(operation: Operation | None) -> bool:
    """Whether an operation adds a gradient to another, or puts it into zeros.

    PyTorch does that in place where nobody else has the first; what is simulated cannot be changed in place there.
    """
    if operation is None or operation.phase != "backward":
        return False
    if operation.name == "aten.add.Tensor" and len(operation.inputs) == 2:
        first, second = operation.inputs
        return (first.sizes, first.dtype) == (second.sizes, second.dtype)
    return base_name(operation) in ("index_put", "_unsafe_index_put") and bool(operation.arguments.get("accumulate"))


FAMILY = Family(
    members={
        "gather": "embedding index index_select gather take _embedding_bag _unsafe_index one_hot take_along_dim"
        " _index_put_impl",
        "scatter": "embedding_dense_backward index_put _unsafe_index_put index_add index_copy scatter scatter_add"
        " scatter_reduce index_fill masked_scatter index_reduce put embedding_backward _embedding_bag_dense_backward",
    },
    work={"gather": _gather, "scatter": _scatter},
    needs={**dict.fromkeys(_PUT, _index_put), "embedding_dense_backward": _embedding_backward},
    copied={"embedding_dense_backward": contiguous(0)},
    host={name: {"indices"} for name in (*_PUT, "_index_put_impl_", "_unsafe_index")},  # crossing.py has `index`
    strict="embedding index_select gather scatter scatter_ scatter_add scatter_add_",
)
