"""Release: what came back."""

import json
import weakref

import pytest
import torch
from torch import nn

from hotloop.memory.release import Released, release


def test_a_record_of_what_came_back() -> None:
    done = release("cpu")
    assert done.before.device == done.after.device == "cpu"
    assert Released.from_json(json.loads(json.dumps(done.to_json()))) == done


def test_garbage_in_cycles_is_collected() -> None:
    ring = [nn.Linear(2, 2)]
    gone = weakref.ref(ring[0])
    ring.append(ring)  # type: ignore[arg-type]
    del ring
    release()
    assert gone() is None


def test_a_device_that_does_not_tell_is_unknown() -> None:
    done = release("meta")
    assert done.given_back is None
    assert "unknown" in str(done)


@pytest.mark.gpu
def test_a_gpu_gets_its_memory_back_once_the_name_is_gone() -> None:
    big = torch.zeros(2**28, device="cuda")
    assert release("cuda").after.allocated >= 2**30
    del big
    done = release("cuda")
    assert done.given_back >= 2**30
    assert done.after.allocated is not None
    assert done.after.free > done.before.free
