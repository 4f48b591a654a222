"""Release: what came back, what is still held and by whom."""

import json
import weakref

import pytest
import torch
from torch import nn

from hotloop.memory.release import Released, release


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
    ring = [nn.Linear(2, 2)]
    gone = weakref.ref(ring[0])
    ring.append(ring)  # type: ignore[arg-type]
    del ring
    release()
    assert gone() is None


def test_a_device_that_does_not_tell_is_unknown() -> None:
    done = release(device="meta")
    assert done.given_back is None
    assert "unknown" in str(done)


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
    assert done.given_back >= 2**30
    assert done.after.allocated is not None
    assert done.after.free > done.before.free
