"""The plan for a run before anything is measured, by the rules of the levers."""

from collections.abc import Mapping, Sequence

import torch

from hotloop.device.backend import backend_of
from hotloop.levers import LEVERS, Lever
from hotloop.levers.base import CONVOLUTIONS, LeverTarget, RunFacts
from hotloop.plan import Plan, Trial, Verdict

EAGER_MEMORY_SHARE = 0.4  # of the memory of a GPU, which eager steps may take so that captured ones fit beside them
# Seconds that a plan takes to begin on a GPU: the gate, kernels used for the first time, warm-up, capture.
START, START_IF_HEAVY, START_OF_CONVOLUTION, START_OF_LAYER = 0.1, 0.4, 0.015, 0.002


def propose(facts: RunFacts, plan: Plan, dropped: Mapping[str, str] | None = None) -> tuple[Plan, list[Trial]]:
    """The plan for the facts of a run, from the one that the person asked for, and why each lever is in it or not.

    `dropped`: levers that failed here, with the reason.
    """
    trials: list[Trial] = []
    for lever in LEVERS:
        verdict: Verdict = "not tried"
        why = (dropped or {}).get(lever.name) or lever.why_not(facts.target, plan)
        if why is None and lever.rule is None:
            why = "no rule proposes it; `loop.tune` tries it"
        elif why is None and lever.rule is not None:
            verdict = "kept" if lever.rule.holds(facts) else verdict
            why = lever.rule.when if verdict == "kept" else f"proposed only if {lever.rule.when}"
            plan = lever.pull(plan) if verdict == "kept" else plan
        elif lever.name in (dropped or {}):
            verdict = "dropped"
        trials.append(Trial(lever.name, lever.tier, verdict, why or ""))
    return plan, trials


def expected_start(target: LeverTarget) -> float:
    """Seconds that a plan for a GPU is expected to hold a run up before it pays, as far as the layers tell."""
    layers = [layer for layer in target.model.modules() if next(layer.parameters(recurse=False), None) is not None]
    convolutions = sum(isinstance(layer, CONVOLUTIONS) for layer in layers)
    begin = START + START_IF_HEAVY * target.may_be_heavy
    return begin + START_OF_CONVOLUTION * convolutions + START_OF_LAYER * (len(layers) - convolutions)


def least_trusted(levers: Sequence[Lever]) -> list[Lever]:
    """The levers to drop after the gate failed: first hotloop's own code, then what rounds most."""
    own = [lever for lever in levers if lever.is_own_code]
    return own or [lever for lever in levers if lever.halves_precision] or [min(levers, key=lambda each: each.trust)]


def has_room(device: torch.device) -> bool:
    """Whether memory has room for a second set of activations: a CUDA graph has its own."""
    backend = backend_of(device)
    peak, total = backend.max_memory_allocated(), backend.total_memory()
    return peak is None or total is None or peak < EAGER_MEMORY_SHARE * total
