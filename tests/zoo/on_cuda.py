"""A script: the zoo on a GPU with deterministic algorithms, against the eager loop by hand. Prints a JSON object.

The optimizers have the flags of a captured step in both, since `capturable` and fused kernels round in their own way.
A process of its own, because cuBLAS reads CUBLAS_WORKSPACE_CONFIG when it begins.
"""

import json
import sys
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from trainings import ZOO, Halted, Parts, Training, by_hand, differences

import hotloop

DEVICE = torch.device("cuda:0")
PLANS = {"graph": hotloop.Plan("cuda:0", graph=1), "several": hotloop.Plan("cuda:0", graph=8)}
EPOCHS = 4  # of five batches: three of them warm a step up, and it is captured after that
STEPS, EVER = 40, 10**6
TRAINED = ("weights", "buffers", "optimizers")
TUNED = (  # with `plan="auto"` too, which takes a second each
    "plain_mlp",
    "dropout",
    "cnn_with_batchnorm",
    "one_cycle_each_step",
    "gan",
    "labels_popped_from_a_dict",
    "lstm_that_carries_its_state",
    "list_of_features",
    "temperature_as_attribute",
    "vq_codebook",
    "module_with_a_torch_generator",
    "transform_with_a_generator",
    "transform_that_draws_from_the_global_one",
    "averaged_model_in_a_hook",
    "counter_in_a_closure",
    "optimizer_with_attributes",
)


def built(training: Training, *, fused: bool = False) -> Parts:
    """Everything on the device, the optimizers as in a captured step, or with their fused kernels."""
    parts = training.build(DEVICE)
    parts.model.to(DEVICE)
    if isinstance(parts.loss, nn.Module):
        parts.loss.to(DEVICE)
    for optimizer in parts.optimizers:
        optimizer._warned_capturable_if_run_uncaptured = True
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            if "fused" in group and (fused or "capturable" not in group):
                group.update(fused=True, foreach=False)
    return parts


def captured(training: Training, plan: hotloop.Plan, expected: Any) -> dict[str, Any]:
    """A plan with a CUDA graph against the loop by hand."""
    parts = built(training)
    try:
        loop = parts.loop(replace(plan, accumulate=parts.accumulate, clip_norm=parts.clip_norm), device=DEVICE)
    except hotloop.HotloopError as refusal:  # before anything was trained, such as for hooks
        return {"refused": str(refusal)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.fit(parts.loader, epochs=EPOCHS, device_transform=parts.transform, progress=False, monitor=False)
    return {"captured": loop.plan.graph > 0, **compared(parts, expected, caught)}


def tuned(training: Training) -> dict[str, Any]:
    """A run that tunes itself against as many steps of the loop by hand."""
    parts = built(training)
    loop = parts.loop("auto", parts.halt(STEPS, Halted), device=DEVICE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(Halted):
            loop.fit(parts.loader, epochs=EVER, device_transform=parts.transform, progress=False, monitor=False)
    expected = built(training, fused=loop.plan.fused)  # from the first step on
    expected.scheduler.append(expected.halt(EVER, Halted))
    turns = len(parts.optimizers) if isinstance(parts.objective, Mapping) else 1
    by_hand(expected, steps=loop.steps // turns, device=DEVICE)
    # A run that is ended from inside has drawn the order of several steps ahead, and counted them in its schedule.
    kept = {name: value for name, value in expected.everything().items() if name in TRAINED}
    return {"plan": str(loop.plan), "steps": loop.steps, **compared(parts, kept, caught)}


def compared(parts: Parts, expected: Any, caught: Any) -> dict[str, Any]:
    seen = {name: value for name, value in parts.everything().items() if name in expected}
    return {
        "words": [str(warning.message) for warning in caught],
        "differences": differences(seen, expected),
        "rounding": differences(seen, expected, close=1e-4),
    }


def results_of(training: Training) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        eager = built(training)
        by_hand(eager, epochs=EPOCHS, device=DEVICE)
    except (RuntimeError, ImportError) as error:  # no deterministic kernel, or transformers is not there
        return {"skipped": f"{type(error).__name__}: {error}"}
    expected = eager.everything()
    again = built(training)
    by_hand(again, epochs=EPOCHS, device=DEVICE)
    if apart := differences(again.everything(), expected):
        return {"skipped": f"the loop by hand is not the same twice: {apart}"}
    for name, plan in PLANS.items():
        found[name] = guarded(captured, training, plan, expected)
    if training.name in TUNED:
        found["auto"] = guarded(tuned, training)
    return found


def guarded(run: Any, *arguments: Any) -> dict[str, Any]:
    try:
        result: dict[str, Any] = run(*arguments)
    except Exception:  # noqa: BLE001  # the others are of interest too
        return {"error": traceback.format_exc()[-1500:]}
    return result


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    chosen = [each for each in ZOO if each.cuda and (len(sys.argv) < 2 or each.name in sys.argv[1:])]
    print(json.dumps({training.name: results_of(training) for training in chosen}))
