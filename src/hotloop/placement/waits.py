"""`waits`: every place where the host waits for a CUDA device, by the line of the person's code that makes it wait."""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch

from hotloop.device.backend import backend_of
from hotloop.placement.sites import Site, is_in_package, is_in_transformer, user_site

_MESSAGE = ".*called a synchronizing CUDA operation.*"


@dataclass
class Waits:
    """Where the host waited, and how often."""

    sites: Counter[Site | None] = field(default_factory=Counter)  # None: not in Python code of the person
    in_packages: int = 0  # of them in the code of an installed package, which may do without in a capture
    at_masks: int = 0  # of them where PyTorch's transformer layers look at a mask, as the lever "given masks" prevents

    def note(self) -> None:
        """The host waits here."""
        self.sites[user_site()] += 1
        self.in_packages += is_in_package()
        self.at_masks += is_in_transformer()

    def add(self, other: "Waits") -> None:
        """Note those of another block, too."""
        self.sites.update(other.sites)
        self.in_packages += other.in_packages
        self.at_masks += other.at_masks

    def __len__(self) -> int:
        return self.sites.total()

    def __str__(self) -> str:
        said = [f"{times}× {site or 'outside your own code'}" for site, times in self.sites.most_common()]
        return "; ".join(said) or "the host did not wait"


@contextmanager
def waits(device: str | torch.device = "cuda") -> Iterator[Waits]:
    """Note every wait of the host for a CUDA device inside the block: `.item()`, `.cpu()`, `if tensor:` and their kin.

    PyTorch tells of the waits that it causes itself; explicit ones (`torch.cuda.synchronize()`, an event's or a
    stream's) are noted beside them. Other devices tell nothing, so nothing is noted there. Only waits of this thread
    count: one that writes a checkpoint beside the training may wait as it likes.

    >>> with waits("cpu") as seen:
    ...     torch.ones(1).item()
    1.0
    >>> len(seen)
    0
    """
    seen = Waits()
    owners = [owner for owner, _ in backend_of(device).synchronizing()]
    if not owners:
        yield seen
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*prototype.*")  # torch says so of the mode itself
        warnings.filterwarnings("always", message=_MESSAGE)
        show, here = warnings.showwarning, threading.get_ident()

        def note(message: Warning | str, category: type[Warning], *rest: object, **more: object) -> None:
            if "synchronizing CUDA operation" in str(message):
                if threading.get_ident() == here:
                    seen.note()
            else:
                show(message, category, *rest, **more)  # type: ignore[arg-type]

        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with _asked_for(seen, owners):
                yield seen
        finally:
            torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _asked_for(seen: Waits, owners: Iterable[Any]) -> Iterator[None]:
    """Note waits that the person asks for: these calls of PyTorch tell nobody."""
    here = threading.get_ident()

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def noted(*args: Any, **options: Any) -> Any:
            if threading.get_ident() == here:
                seen.note()
            return call(*args, **options)

        return noted

    with ExitStack() as undo:
        for owner in owners:
            undo.callback(setattr, owner, "synchronize", owner.synchronize)
            owner.synchronize = noting(owner.synchronize)
        yield
