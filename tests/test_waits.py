"""`waits`: on a CPU nothing is noted and nothing is touched; on a GPU, played here, waits are noted by their line."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import pytest
import torch

import hotloop
from hotloop.placement.sites import Site
from hotloop.placement.waits import Waits, waits

OWNERS: list[Any] = [torch.cuda, torch.cuda.Event, torch.cuda.Stream]


@contextmanager
def watched(device: Any = "cuda") -> Iterator[Waits]:
    """`waits`, which leaves PyTorch's own calls and the settings of warnings as they were, whatever happens inside."""

    def now() -> Any:
        return [owner.synchronize for owner in OWNERS], warnings.showwarning, list(warnings.filters)

    before = now()
    try:
        with waits(device) as seen:
            yield seen
    finally:
        assert now() == before


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"])
def test_other_devices_than_a_gpu_are_left_alone(device: Any) -> None:
    before = [owner.synchronize for owner in OWNERS]
    with watched(device) as seen:
        assert [owner.synchronize for owner in OWNERS] == before
        torch.ones(2).sum().item()
        if torch.ones(1):
            torch.ones(1).cpu().numpy()
    assert len(seen) == 0
    assert str(seen) == "the host did not wait"


def test_a_gpu_that_is_not_there_notes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with watched() as seen:
        torch.ones(1).item()
    assert len(seen) == 0


def test_an_error_inside_is_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError), watched("cpu"):
        raise ZeroDivisionError


class Gpu:
    """What PyTorch does on a GPU, as far as waits are concerned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode, self.synchronized = 0, 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self._set)
        monkeypatch.setattr(torch.cuda, "synchronize", self._synchronize)

    def _set(self, mode: int | str) -> None:
        self.mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)

    def _synchronize(self, device: Any = None) -> str:
        self.synchronized += 1
        return "done"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.mark.usefixtures("gpu")
def test_waits_are_noted_by_their_line_each_time() -> None:
    with watched() as seen:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)  # as PyTorch says it
    ((site, times),) = seen.sites.items()
    assert site.file == __file__
    assert "as PyTorch says it" in site.code
    assert times == len(seen) == 3


def test_waits_that_are_asked_for_are_noted_and_made(gpu: Gpu) -> None:
    with watched() as seen:
        assert torch.cuda.synchronize() == "done"  # asked for
    assert gpu.synchronized == 1
    ((site, times),) = seen.sites.items()
    assert "asked for" in site.code
    assert times == 1
    torch.cuda.synchronize()
    assert len(seen) == 1, "what comes after the block is nobody's affair"


@pytest.mark.parametrize("mode", [0, 1])
def test_the_mode_comes_back_after_an_error(gpu: Gpu, mode: int) -> None:
    gpu.mode = mode
    with suppress(ZeroDivisionError), watched():
        assert gpu.mode == 1
        raise ZeroDivisionError
    assert gpu.mode == mode


@pytest.mark.usefixtures("gpu")
def test_other_warnings_are_still_warnings() -> None:
    with pytest.warns(UserWarning, match="something else"), watched() as seen:
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert len(seen) == 0
    with pytest.raises(UserWarning, match="an error"), watched():
        warnings.warn("an error", UserWarning, stacklevel=1)  # as the settings of these tests have it


def test_what_is_said_of_waits() -> None:
    here = Site("nowhere/train.py", 7)
    seen = Waits()
    seen.sites[here] += 3
    seen.sites[None] += 1
    assert len(seen) == 4
    assert str(seen) == "3× nowhere/train.py:7; 1× outside your own code"


def test_the_package_has_it_whatever_was_imported_before() -> None:
    assert "waits" in hotloop.__all__
    with hotloop.waits("cpu") as seen:
        pass
    assert type(seen) is Waits
    assert import_module("hotloop.placement.waits").waits is waits
