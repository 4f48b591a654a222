"""What lessons import: the GPU of a lesson and the table of measurements."""

from collections import Counter

import pytest
import torch

from hotloop.apps.learn import lab
from hotloop.placement.sites import Site


def test_a_simulated_gpu_says_that_it_is_one_and_what_happened_on_it(capsys: pytest.CaptureFixture[str]) -> None:
    with lab.gpu() as seen:
        x = torch.ones(1000).to("cuda")
        x.sum().item()
    assert seen.simulated is not torch.cuda.is_available()
    assert ("on a simulated NVIDIA H200" in capsys.readouterr().out) is seen.simulated
    assert "1 copy to the device, pageable: the CPU waits" in str(seen)
    assert "the CPU waits 1 time" in str(seen)
    assert seen.peak >= 4000


def test_what_happened_is_known_after_an_error_too_and_may_be_nothing() -> None:
    def broken() -> None:
        torch.ones(1000).to("cuda")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), lab.gpu(quiet=True) as seen:
        broken()
    assert len(seen.copies) == 1
    with lab.gpu(quiet=True) as seen:
        pass
    assert str(seen) == "no copies, no waits"


def test_copies_of_a_real_gpu_are_noted_by_line() -> None:
    with lab._Copies() as copies:  # between any two devices
        x = torch.ones(3)
        x.to("meta")
        x.to("meta", non_blocking=True)
        x.to("cpu", copy=True)
        torch.empty(3, device="meta").copy_(x)
    ways = [(way, pinned, blocking) for _, _, way, pinned, blocking in copies.counts]
    assert ways == [("to the device", False, True), ("to the device", False, False), ("to the device", False, True)]
    assert set(copies.bytes.values()) == {12}
    assert all(file == __file__ for file, *_ in copies.counts)


def test_a_wait_of_a_real_gpu_is_told_once() -> None:
    with lab._Copies() as copies:
        x = torch.ones(3)
        x.to("meta")
        x[0].item()
    (file, line, *_) = next(iter(copies.counts))
    sites = Counter({Site(file, line): 1, Site(file, line + 1): 2, None: 1})  # as PyTorch tells of waits
    assert [(each.line, each.kind, each.count) for each in copies.other_waits(sites)] == [(line + 1, "item", 2)]


def test_the_named_gpu_has_a_column_where_it_was_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab, "reference", lambda: {"gpu": "X1", "rows": {"known": "1 µs"}})
    lab.beside({"known": 0.5, "not known": 1536}, here="cpu")
    assert capsys.readouterr().out == (
        "what       cpu      X1\nknown      500 ms   1 µs\nnot known  1.5 KiB  –\n"  # and never 0
    )
    lab.beside({"not known": "3 times"}, here="cpu")
    assert capsys.readouterr().out == "what       cpu\nnot known  3 times\n"
    assert lab.recorded["not known"] == "3 times"
