"""The workloads: what is trained, in the size that suits the device, and the same for every contestant."""

from collections.abc import Callable
from dataclasses import replace

import torch

from harness.workloads.adversarial import dcgan_workload
from harness.workloads.diffusion import unet_workload
from harness.workloads.language import bert_workload, llama_workload, lstm_workload
from harness.workloads.parts import Objective as Objective
from harness.workloads.parts import Scale as Scale
from harness.workloads.parts import TrainingParts as TrainingParts
from harness.workloads.parts import Workload as Workload
from harness.workloads.pictures import airbench_workload, jpeg_workload
from harness.workloads.reference import (
    cnn_workload,
    gpt2_workload,
    gpt_workload,
    mlp_workload,
    resnet18_workload,
    sprites_workload,
)
from harness.workloads.unseen import shufflenet_workload, t5_workload, vit_workload
from hotloop.errors import BadArgument

# Each has an expert's loop in `benchmarks/expert`.
RACED: dict[str, Callable[[Scale], Workload]] = {
    "mlp": mlp_workload,
    "cnn": cnn_workload,
    "resnet18": resnet18_workload,
    "sprites": sprites_workload,
    "gpt": gpt_workload,
    "gpt2": gpt2_workload,
}
APPLICATIONS: dict[str, Callable[[Scale], Workload]] = {
    "dcgan": dcgan_workload,
    "lstm": lstm_workload,
    "llama": llama_workload,
    "unet": unet_workload,
    "bert": bert_workload,
    "jpeg": jpeg_workload,
    "airbench": airbench_workload,
}
# Models of other libraries that hotloop was not developed with.
UNSEEN: dict[str, Callable[[Scale], Workload]] = {
    "unseen-vit": vit_workload,
    "unseen-shufflenet": shufflenet_workload,
    "unseen-t5": t5_workload,
}
WORKLOADS = {**RACED, **APPLICATIONS, **UNSEEN}
END_TO_END = ("mlp", "cnn", "resnet18", *APPLICATIONS)  # what is timed end to end where nothing is named


def workload(name: str, device: str | torch.device, *, quick: bool = False, seed: int = 0) -> Workload:
    """The workload of this name for a device; `quick` is one that takes seconds, to see that everything works.

    >>> workload("mlp", "cpu").steps
    16
    """
    if name not in WORKLOADS:
        raise BadArgument(f"there is no workload {name!r}", fix=f"choose one of: {', '.join(WORKLOADS)}")
    made = WORKLOADS[name](Scale(torch.device(device), quick, seed))
    return replace(made, seed=seed)
