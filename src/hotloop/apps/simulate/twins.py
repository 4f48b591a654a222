"""The values themselves, computed on the host beside the simulation: for small models whose path depends on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotloop.apps.simulate._torch import is_simulated, negated_view, storage_id, without_functions
from hotloop.apps.simulate.families import BACKWARDS, FORWARDS
from hotloop.apps.simulate.families.base import Unable
from hotloop.apps.simulate.known import Known
from hotloop.apps.simulate.operations import facts, is_host, named, on_device
from hotloop.printing.text import printable
from hotloop.values.tree import map_tensors, tensors_of

_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_", "set_"}
_HALVES = (torch.float16, torch.bfloat16)


class Twins(Known):
    """Every memory of the simulated device has a twin on the host, and every operation runs on the twins as well.

    Views and in-place operations need no care: a tensor's twin is the same window on the twin of its memory. Random
    numbers are the host's, in the order in which the script asks for them, as if its device were the CPU. What a CUDA
    graph captures is computed by its replays, and not before.
    """

    everything = True

    def __init__(self) -> None:
        self._unable: dict[str, str] = {}  # by operation: why its values are not known

    def arrived(self, tensor: Tensor, values: Tensor) -> None:
        if self.captured is not None:
            self.captured.append(partial(self.arrive, tensor, values))
        else:
            self.arrive(tensor, values)

    def happened(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func.is_view or facts(func).name in _UNWRITTEN:
            return
        if self.captured is not None:
            self.captured.append(partial(self.compute, func, args, kwargs, result))
        else:
            self.compute(func, args, kwargs, result)

    def arrive(self, tensor: Tensor, values: Tensor) -> None:
        """Values of the host are there now."""
        with without_functions():
            self.values(tensor).copy_(values.detach())

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Compute an operation on the twins."""
        with without_functions():
            given = [t.untyped_storage() for t in tensors_of((args, kwargs)) if is_simulated(t)]
            there = {storage_id(storage) for storage in given}
            try:
                computed = self._computed(func, args, kwargs, result)
            except Unable as reason:
                self._unable.setdefault(str(func), str(reason))
                computed = [_placeholder(tensor) for tensor in tensors_of(result)]
            taken = {storage_id(storage._hotloop_twin) for storage in given if hasattr(storage, "_hotloop_twin")}
            for tensor, value in zip(tensors_of(result), tensors_of(computed), strict=False):
                if not is_host(tensor) and storage_id(tensor) not in there:
                    self._keep(func, tensor, value, taken)

    def values(self, tensor: Tensor) -> Tensor:
        """The window of a tensor on the twin of its memory, which is zeros where nothing was written yet."""
        storage = tensor.untyped_storage()
        twin = getattr(storage, "_hotloop_twin", None)
        if twin is None:
            twin = torch.zeros(storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()
            storage._hotloop_twin = twin  # type: ignore[attr-defined]
        elif twin.nbytes() < storage.nbytes():
            twin.resize_(storage.nbytes())
        window = torch.empty(0, dtype=tensor.dtype, device="cpu")
        window.set_(twin, tensor.storage_offset(), tensor.size(), tensor.stride())
        if tensor.is_conj():
            window = window.conj()
        return negated_view(window) if tensor.is_neg() else window

    def notes(self) -> list[str]:
        return [
            f"the host could not compute {name}, so that placeholders stand for its values: {printable(why)}"
            for name, why in sorted(self._unable.items())
        ]

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """What an operation gives on the twins, by its own kernel on the host or by what is there in its place.

        Half precision is computed in single precision and rounded, as a GPU accumulates it.
        """
        name = facts(func).name
        widened: dict[int, tuple[Tensor, Tensor]] = {}  # by operand: its twin, and that in single precision

        def wide(tensor: Tensor) -> Tensor:
            if id(tensor) not in widened:
                twin = self.values(tensor) if is_simulated(tensor) else tensor
                widened[id(tensor)] = (twin, twin.float() if twin.dtype in _HALVES else twin)
            return widened[id(tensor)][1]

        try:
            with _on_host(kwargs) as given:
                operands, options = map_tensors((args, given), wide)
                if name in BACKWARDS:
                    arguments = _arguments(func, operands, options)
                    return BACKWARDS[name].computed(_kept(func, args, kwargs), arguments)
                if name in FORWARDS:
                    computed, kept = FORWARDS[name](_arguments(func, operands, options))
                    for tensor in tensors_of(result):
                        tensor.untyped_storage()._hotloop_kept = kept  # type: ignore[attr-defined]
                    return computed
                computed = func(*operands, **options)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            raise  # a matrix is singular, and the device would say so too
        except RuntimeError as error:  # the host has no kernel for it
            raise Unable(str(error).partition("\n")[0]) from error
        for tensor in _written(func, args, kwargs):
            twin, value = widened[id(tensor)]
            if twin is not value:
                twin.copy_(value)
        return computed

    def _keep(self, func: Any, tensor: Tensor, value: Tensor, taken: set[int]) -> None:
        """Values become those of a tensor; where they lie as it would, and nobody else's, their memory is its twin."""
        if value.size() != tensor.size():
            if tensor.numel():
                self._unable.setdefault(str(func), f"its result on the host has the shape {tuple(value.size())}")
                self.values(tensor).copy_(_placeholder(tensor))
            return
        storage, made = tensor.untyped_storage(), value.untyped_storage()
        alike = _layout(value) == _layout(tensor) and not (value.is_conj() or value.is_neg())
        if alike and storage_id(made) not in taken:
            storage._hotloop_twin = made  # type: ignore[attr-defined]
            taken.add(storage_id(made))
        else:
            self.values(tensor).copy_(value)


@contextmanager
def _on_host(kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments for the host: a generator of the device is stood for by one that draws the same numbers."""
    given = dict(kwargs)
    if on_device(given.get("device")):
        given["device"] = torch.device("cpu")
    if given.get("dtype") in _HALVES:
        given["dtype"] = torch.float32
    generator = given.get("generator")
    if generator is None or generator.device.type == "cpu":
        yield given
        return
    given["generator"] = torch.Generator(device="cpu")
    given["generator"].set_state(generator.get_state())
    yield given
    generator.set_state(given["generator"].get_state())


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name, with None for those that were left out."""
    return dict.fromkeys(facts(func).names) | dict(named(func, args, kwargs))


def _kept(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the forward of an operation kept, with the memory of what it gave."""
    held = _arguments(func, args, kwargs)[BACKWARDS[facts(func).name].kept_with]
    return getattr(held.untyped_storage(), "_hotloop_kept", None)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The operands that an operation writes to."""
    names = facts(func).written
    return tensors_of([value for name, value in named(func, args, kwargs) if name in names])


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """How a tensor lies in its memory."""
    return tensor.dtype, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()


def _placeholder(tensor: Tensor) -> Tensor:
    """A number that is plausible and does no harm: a half, or truth."""
    number = 0.5 if tensor.dtype.is_floating_point else 1
    return torch.full(tensor.size(), number, dtype=tensor.dtype, device="cpu")
