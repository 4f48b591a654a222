"""hotloop itself, through its public names only: a `Loop`, tuned, then `fit`."""

from dataclasses import fields

import torch

import hotloop
from harness.contestants.protocol import Started, timed
from harness.workloads import TrainingParts
from hotloop.plan import Plan
from hotloop.printing.text import plural

KERNELS = {"kernels": "fused kernels", "row kernels": "row kernels"}
WORDS = {
    "tf32": "TF32",
    "channels_last": "channels_last",
    "cudnn_benchmark": "cudnn.benchmark",
    "fused": "fused optimizer",
    "pinned": "pinned batches",
    "checkpointing": "checkpointing",
}


def hot(parts: TrainingParts, device: torch.device, *, plan_for: float) -> Started:
    """A `Loop` whose plan was tuned for so many seconds of plain training."""
    loop = loop_of(parts, device)
    transform = parts.device_transform
    loop.tune(parts.loader, seconds=plan_for, device_transform=transform, progress=False)

    def epochs(count: int) -> None:
        loop.fit(parts.loader, epochs=count, device_transform=transform, progress=False)

    return Started(timed(epochs, device), in_words(loop.plan), loop.plan)


def loop_of(parts: TrainingParts, device: torch.device | hotloop.Choice, plan: Plan | str = "auto") -> hotloop.Loop:
    """A `Loop` of these parts."""
    return hotloop.Loop(parts.model, parts.optimizer, parts.loss, objective=parts.objective, device=device, plan=plan)


def in_words(plan: Plan) -> str:
    """What a plan does that a plain loop does not.

    >>> in_words(Plan(device="cuda:0", precision="bf16", stream="resident", graph=16))
    'bf16, data on the device, graph of 16 steps'
    """
    said: list[str] = [plan.precision]
    said += [WORDS[field.name] for field in fields(plan) if field.name in WORDS and getattr(plan, field.name)]
    if plan.compile == "off":
        said += [words for name, words in KERNELS.items() if name in plan.levers]
    if plan.stream in ("resident", "prefetched"):
        said.append("data on the device" if plan.stream == "resident" else "batches copied ahead")
    if plan.workers is not None:
        said.append(plural(plan.workers, "worker"))
    if plan.compile != "off":
        said.append("compiled" if plan.compile == "default" else f"compiled ({plan.compile})")
    if plan.graph:
        said.append("graph of one step" if plan.graph == 1 else f"graph of {plan.graph} steps")
    return ", ".join(said)
