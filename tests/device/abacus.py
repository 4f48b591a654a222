"""An accelerator that exists nowhere: PyTorch's part of it in Python (tensors on the host that say `abacus:0`, with a
generator of their own), and hotloop's part, which is the class `Abacus` alone."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from hotloop.device.backend import BACKENDS, Accelerator

MEMORY = 1 << 30


class Abacus(Accelerator):
    """What hotloop has to know."""

    tells_memory = True
    called = "abacus"
    waits = 0

    def synchronize(self) -> None:
        self.waits += 1

    def memory_allocated(self) -> int:
        return LIVE.now

    def max_memory_allocated(self) -> int:
        return LIVE.peak

    def reset_peak_memory_stats(self) -> None:
        LIVE.peak = LIVE.now

    def mem_get_info(self) -> tuple[int, int]:
        return MEMORY - LIVE.now, MEMORY

    def room(self) -> int:
        return MEMORY - LIVE.now

    free_memory = room


BACKENDS["abacus"] = Abacus


# PyTorch's part


class Live:
    """Bytes of tensors."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.storages: set[int] = set()

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.storages:
            return
        self.storages.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.storages.discard(key)
        self.now -= size


LIVE = Live()
GENERATOR = torch.Generator()


class Module:
    """What PyTorch has as `torch.abacus`."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_device_name(self, index: int = 0) -> str:
        return "Abacus One"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return GENERATOR.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        GENERATOR.set_state(state)

    def manual_seed_all(self, seed: int) -> None:
        GENERATOR.manual_seed(seed)


class Beads(Tensor):
    """A tensor on the abacus."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> Any:
        form: Any = {"strides": raw.stride(), "dtype": raw.dtype, "device": "abacus:0"}
        made = Tensor._make_wrapper_subclass(cls, raw.shape, storage_offset=raw.storage_offset(), **form)
        made.raw = raw
        LIVE.add(raw.untyped_storage())
        return made

    def tolist(self) -> Any:
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return calculated(func, *args, **(kwargs or {}))


def calculated(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation, done on the host."""
    given: dict[int, Beads] = {}

    def down(value: Any) -> Any:
        if isinstance(value, Beads):
            given[id(value.raw)] = value
            return value.raw
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def up(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return given[id(value)] if id(value) in given else Beads(value)

    to_host = kwargs.get("device") == torch.device("cpu")
    args, kwargs = tree_map(down, (args, kwargs))
    host = torch.get_rng_state()
    draws = torch.Tag.nondeterministic_seeded in func.tags
    if draws:
        torch.set_rng_state(GENERATOR.get_state())
    result = func(*args, **kwargs)
    if draws:
        GENERATOR.set_state(torch.get_rng_state())
        torch.set_rng_state(host)
    if to_host or (func is torch.ops.aten.copy_.default and id(args[0]) not in given):
        return result.clone() if to_host else result
    return tree_map(up, result)


_setup_privateuseone_for_python_backend("abacus", Module())
LIBRARY = torch.library.Library("_", "IMPL")
LIBRARY.fallback(calculated, "PrivateUse1")
