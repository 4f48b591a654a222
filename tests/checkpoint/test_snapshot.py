"""Snapshots hold the values of their moment, and their bytes come in the order of the file."""

import io
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import safetensors.torch
import torch
from torch import Tensor

from hotloop.checkpoint import host_copies
from hotloop.checkpoint.host_copies import BLOCK, Snapshots, fits
from hotloop.checkpoint.tensorfile import Source, write_tensors

from .trees import same


def through_a_file(sources: list[Source]) -> dict[str, Tensor]:
    file = io.BytesIO()
    write_tensors(file, sources)
    return safetensors.torch.load(file.getvalue())


def test_a_copy_must_leave_room_for_the_peak_of_training() -> None:
    assert fits(10, free=20, reserved=50, peak=50)
    assert not fits(10, free=19, reserved=50, peak=50)
    assert not fits(10, free=0, reserved=100, peak=90), "what is cached now is needed again in the next step"
    assert not fits(10, free=0, reserved=50, peak=90), "a peak of before the cache was emptied"


def sample(device: str) -> dict[str, Tensor]:
    image = torch.arange(2.0 * 3 * 4 * 5, device=device).view(2, 3, 4, 5)
    return {
        "half": torch.ones(3, dtype=torch.float16, device=device),
        "step": torch.tensor(7, dtype=torch.int64),
        "channels last": image.contiguous(memory_format=torch.channels_last),
        "flags": torch.tensor([True, False], device=device),
        "wide": torch.arange(6.0, device=device).expand(2, 6),
        "nothing": torch.empty(0, 3, device=device),
        "large": torch.arange(BLOCK // 2 + 5, dtype=torch.int32, device=device),  # more than two buffers
        "states": torch.arange(9, dtype=torch.uint8),
    }


def ordered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[name].cpu().contiguous() for name in sorted(tensors)}


@pytest.mark.gpu
@pytest.mark.parametrize("roomy", [True, False])
def test_a_snapshot_of_a_device_waits_for_nothing(
    roomy: bool, monkeypatch: pytest.MonkeyPatch, no_waits: Callable[[], AbstractContextManager[None]]
) -> None:
    monkeypatch.setattr(host_copies, "fits", lambda *_, **__: roomy)
    taking = Snapshots()
    through_a_file(taking.take(sample("cuda")))  # pinned memory is there from now on
    tensors = sample("cuda")
    tensors["wide"] = tensors["wide"].contiguous()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    torch.cuda.synchronize()
    with no_waits():
        torch.cuda._sleep(200_000_000)  # the device is busy, so a copy that came too late would show
        sources = taking.take(tensors)
        still_busy = not torch.cuda.current_stream().query()
        for tensor in tensors.values():
            tensor.zero_()
    assert still_busy
    assert same(ordered(through_a_file(sources)), ordered(before))


@pytest.mark.gpu
@pytest.mark.parametrize("roomy", [True, False])
def test_pinned_buffers_are_used_again(roomy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "fits", lambda *_, **__: roomy)
    taking = Snapshots()
    tensors = sample("cuda")
    through_a_file(taking.take(tensors))
    pinned = {buffer.data_ptr() for buffer in taking._buffers}
    assert pinned
    assert same(ordered(through_a_file(taking.take(tensors))), ordered(tensors))
    assert {buffer.data_ptr() for buffer in taking._buffers} == pinned


@pytest.mark.gpu
def test_a_full_device_is_copied_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> dict[str, Tensor]:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(
        host_copies, "_cloned", lambda tensors: full(tensors) if next(iter(tensors.values())).is_cuda else tensors
    )
    tensors = sample("cuda")
    assert same(ordered(through_a_file(Snapshots().take(tensors))), ordered(tensors))
