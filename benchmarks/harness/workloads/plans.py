"""Plans that a person who knows the field writes down for each workload without a trial."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from hotloop.errors import BadArgument
from hotloop.plan import Plan

Settings = Mapping[str, Any]

_HALF: Settings = {"precision": "bf16", "fused": True}
_IMAGES: Settings = {**_HALF, "channels_last": True}
_ON_DEVICE: Settings = {"stream": "resident"}
_AHEAD: Settings = {"stream": "prefetched", "pinned": True}
_COMPILED: Settings = {"compile": "default"}


def _ladder(common: Settings, *, graph: int = 16) -> tuple[Settings, ...]:
    """The same settings with a CUDA graph, without one, and each of them compiled."""
    return (
        {**common, "graph": graph},
        common,
        {**common, **_COMPILED, "graph": graph},
        {**common, **_COMPILED},
    )


def _jpeg() -> tuple[Settings, ...]:
    workers = {"workers": max(1, (os.cpu_count() or 2) - 1)}  # one core is left for the loop itself
    common = {**_IMAGES, **_AHEAD}
    return (
        {**common, **workers, "graph": 1},
        {**common, **workers},
        {**common, "graph": 1},
        {**common, **workers, **_COMPILED},
    )


_ON_CUDA: dict[str, tuple[Settings, ...]] = {
    "mlp": (
        {**_ON_DEVICE, "fused": True, "graph": 16},
        {**_ON_DEVICE, **_HALF, "graph": 16},
        {**_ON_DEVICE, "fused": True},
    ),
    "cnn": _ladder({**_IMAGES, **_ON_DEVICE}),
    "resnet18": _ladder({**_IMAGES, **_ON_DEVICE}),
    "sprites": _ladder({**_IMAGES, **_ON_DEVICE}),
    "gpt": _ladder({**_HALF, **_ON_DEVICE}),
    "gpt2": _ladder({**_HALF, **_AHEAD}, graph=1),  # its dataset is a class of its own, which is not kept on the device
    "dcgan": _ladder({**_IMAGES, **_ON_DEVICE}),
    "lstm": _ladder({**_HALF, **_ON_DEVICE}),
    "llama": _ladder({**_HALF, **_AHEAD}, graph=1),
    "unet": (*_ladder({**_HALF, **_ON_DEVICE}), {**_IMAGES, **_ON_DEVICE, "graph": 16}),
    "bert": ({**_HALF, **_AHEAD}, {**_HALF, **_AHEAD, **_COMPILED}, {**_HALF, **_AHEAD, "graph": 1}),
    "jpeg": _jpeg(),
    "airbench": _ladder({**_IMAGES, **_ON_DEVICE}),
    "unseen-vit": _ladder({**_HALF, **_ON_DEVICE}),
    "unseen-shufflenet": _ladder({**_IMAGES, **_ON_DEVICE}),
    "unseen-t5": _ladder({**_HALF, **_AHEAD}, graph=1),
}
_ELSEWHERE: tuple[Settings, ...] = ({**_ON_DEVICE, "fused": True}, {"fused": True})


def plans_by_hand(workload: str, device: torch.device) -> tuple[Plan, ...]:
    """The plans for a workload; one that a `Loop` refuses is there all the same.

    >>> plans_by_hand("cnn", torch.device("cuda"))[0]
    Plan('cuda', precision='bf16', stream='resident', fused=True, channels_last=True, graph=16)
    """
    if workload not in _ON_CUDA:
        raise BadArgument(f"no plans are written down for {workload!r}", fix=f"choose one of: {', '.join(_ON_CUDA)}")
    listed = _ON_CUDA[workload] if device.type == "cuda" else _ELSEWHERE
    return tuple(Plan(str(device), **settings) for settings in listed)
