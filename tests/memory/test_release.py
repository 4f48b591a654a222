"""Release: what came back, what is still held and by whom; and who empties the cache in every step."""

import json
import warnings
import weakref

import pytest
import torch
from torch import nn

from hotloop.errors import MemoryWarning
from hotloop.memory.oom import clear
from hotloop.memory.release import EmptyCacheWatch, Released, release


def test_what_is_handed_in_is_still_held_and_its_name_is_told() -> None:
    model = nn.Linear(100, 100)
    model(torch.randn(2, 100)).sum().backward()
    done = release(model)
    assert done.held == 2 * 4 * (100 * 100 + 100)
    assert done.holders == ("`model`, a local of `test_what_is_handed_in_is_still_held_and_its_name_is_told`",)
    assert "still held by `model`" in str(done)
    assert "`del`" in str(done)


def test_the_state_of_an_optimizer_and_nested_tensors_count_once() -> None:
    weight = nn.Parameter(torch.randn(50))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.sum().backward()
    optimizer.step()
    batch = {"x": [weight, weight[:5]]}
    assert release(optimizer, batch).held == 2 * 200


def test_with_nothing_handed_in_nothing_is_held() -> None:
    done = release(device="cpu")
    assert done.held == 0
    assert done.holders == ()
    assert "held" not in str(done)
    assert Released.from_json(json.loads(json.dumps(done.to_json()))) == done


def test_garbage_in_cycles_is_collected() -> None:
    import gc
    import weakref

    gc.disable()
    try:
        ring = [nn.Linear(2, 2)]
        gone = weakref.ref(ring[0])
        ring.append(ring)  # type: ignore[arg-type]
        del ring
        assert gone() is not None
        release()
        assert gone() is None
    finally:
        gc.enable()


def test_a_device_that_does_not_tell_is_unknown() -> None:
    done = release(device="meta")
    assert done.given_back is None
    assert "unknown" in str(done)


def emptied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []

    def empty_cache() -> None:
        calls.append(1)

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(torch.cuda.memory, "empty_cache", empty_cache)
    return calls


def test_emptying_the_cache_in_every_step_is_warned_of_once_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = emptied(monkeypatch)
    with EmptyCacheWatch() as watch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(20):
            torch.cuda.empty_cache()
            watch.step()
    assert [each.category for each in said] == [MemoryWarning]
    assert len(calls) == 20
    message = str(said[0].message)
    assert "5 times in 5 steps" in message
    assert "test_release.py" in message
    assert "torch.cuda.empty_cache()" in message.splitlines()[1]
    assert "fix: delete the call" in message
    assert watch.seconds > 0
    assert watch.sites.total() == 20


def test_now_and_then_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied(monkeypatch)
    with EmptyCacheWatch() as watch, warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(20):
            if step % 4:
                torch.cuda.memory.empty_cache()
            watch.step()
    assert watch.sites.total() == 15


def test_what_hotloop_clears_itself_is_nobodys_habit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = emptied(monkeypatch)
    with EmptyCacheWatch() as watch, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            clear(torch.device("cuda"))  # as after memory ran out in an optimizer that is updated in parts
            watch.step()
    assert len(calls) == 20
    assert watch.sites.total() == 0


def test_the_function_is_its_own_again_afterwards() -> None:
    before = torch.cuda.empty_cache, torch.cuda.memory.empty_cache
    with EmptyCacheWatch():
        assert torch.cuda.empty_cache is not before[0]
    with pytest.raises(KeyError), EmptyCacheWatch():
        raise KeyError
    assert (torch.cuda.empty_cache, torch.cuda.memory.empty_cache) == before
    assert str(EmptyCacheWatch()) == "torch.cuda.empty_cache() was not called"


def test_a_look_at_who_holds_it_does_not_hold_it() -> None:
    big = torch.zeros(2**10)
    gone = weakref.ref(big)
    assert any("`big`" in name for name in release(big).holders)
    del big
    assert gone() is None


def test_what_locals_gave_out_stays_whole() -> None:
    big = torch.zeros(2**10)
    mine = locals()
    assert release(big).holders
    assert mine["big"] is big


@pytest.mark.gpu
def test_a_gpu_gets_its_memory_back_once_the_name_is_gone() -> None:
    big = torch.zeros(2**28, device="cuda")
    held = release(big)
    assert held.held == 2**30
    assert any("`big`" in name for name in held.holders)
    del big
    done = release(device="cuda")
    assert done.given_back is not None
    assert done.given_back >= 2**30
    assert done.after.allocated is not None
    assert done.before.free is not None
    assert done.after.free is not None
    assert done.after.free > done.before.free


@pytest.mark.gpu
def test_the_real_cache_is_emptied_inside_the_watch() -> None:
    cached = torch.zeros(2**26, device="cuda")
    del cached
    before = torch.cuda.memory_reserved()
    with EmptyCacheWatch() as watch:
        torch.cuda.empty_cache()
        watch.step()
    assert torch.cuda.memory_reserved() < before
    assert watch.seconds > 0
