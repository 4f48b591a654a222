"""Memory that is free but in pieces: told from memory that is full, and mended by segments that can grow."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from hotloop._torch import allocator_settings, set_allocator_settings
from hotloop.device.backend import backend_of
from hotloop.printing.text import size
from hotloop.records import Record

SETTING = "expandable_segments"
_ASKED_FOR = re.compile(r"Tried to allocate (\d+(?:\.\d+)?) ([KMGT])iB")


@dataclass(frozen=True)
class Fragmented(Record):
    """Memory ran out although the allocator had enough of it, in pieces that were each too small."""

    requested: int  # bytes
    unused: int  # reserved and in no tensor: all the pieces together

    def __str__(self) -> str:
        return f"memory was fragmented: {size(self.unused)} reserved and unused in pieces"


def judged(said: str, statistics: Mapping[str, int]) -> Fragmented | None:
    """How memory was fragmented, by an error's words and `torch.cuda.memory_stats` at that moment; None: it was full.

    Before it gives up, the allocator returns every segment that is wholly free to the device. So what it still holds
    and does not use lies between tensors.

    >>> held = {"reserved_bytes": 8 * 2**30, "allocated_bytes": 5 * 2**30, "inactive_split_bytes": 3 * 2**30}
    >>> said = "CUDA out of memory. Tried to allocate 2.00 GiB"
    >>> print(judged(said, {f"{name}.all.current": bytes_ for name, bytes_ in held.items()}))
    memory was fragmented: 3.0 GiB reserved and unused in pieces
    """
    asked = _ASKED_FOR.search(said)
    figures = [statistics.get(f"{name}_bytes.all.current", 0) for name in ("reserved", "allocated", "inactive_split")]
    reserved, allocated, between = figures
    unused = min(reserved - allocated, between)
    if asked is None:
        return None
    requested = int(float(asked[1]) * 1024 ** (1 + "KMGT".index(asked[2])))
    if not 0 < requested <= unused:
        return None
    return Fragmented(requested, unused)


def mend(found: Fragmented, device: torch.device) -> bool:
    """Turn on expandable segments for what is allocated from now on; whether what was asked for has a place then.

    They take memory from the device in pages, wherever those lie, and give back each page that is free. Tensors that
    stay keep the segments that they are in, and the holes between them. To be called when what the failed attempt
    held has been released; where it does not help, everything is as before.
    """
    before = allocator_settings()
    if before is None or not may_be_set(before) or not backend_of(device).has_expandable_segments():
        return False
    first = f"{before.strip(' ,')}," if before.strip(" ,") else ""  # whatever is not repeated goes back to its default
    try:
        set_allocator_settings(f"{first}{SETTING}:True")
        torch.empty(found.requested, dtype=torch.uint8, device=device)  # too large for any hole, so it takes pages
    except (RuntimeError, ValueError, NotImplementedError):  # a driver without them, or no room even so
        with suppress(RuntimeError, ValueError, NotImplementedError):
            set_allocator_settings(f"{first}{SETTING}:False")
        return False
    return True


def may_be_set(settings: str) -> bool:
    """Whether nobody has decided about expandable segments yet: neither the person nor an earlier attempt.

    >>> may_be_set("max_split_size_mb:512"), may_be_set("expandable_segments:False")
    (True, False)
    """
    return SETTING not in settings


def are_on() -> bool:
    """Whether the allocator was told to use expandable segments."""
    return f"{SETTING}:true" in (allocator_settings() or "").replace(" ", "").lower()
