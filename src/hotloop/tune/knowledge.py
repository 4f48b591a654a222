"""The plan that an expert would write down for a run before measuring anything: what the rules of the levers say."""

from collections.abc import Mapping
from dataclasses import dataclass

from hotloop.levers import LEVERS
from hotloop.levers.base import RunFacts
from hotloop.plan import Plan, Trial, Verdict


@dataclass(frozen=True)
class Proposal:
    """A plan, and why each lever is in it or not."""

    plan: Plan
    trials: tuple[Trial, ...]
    key: str = ""  # under which what was found is remembered


def propose(facts: RunFacts, plan: Plan, dropped: Mapping[str, str] | None = None) -> Proposal:
    """The plan for what is known of a run, from the one that the person asked for.

    `dropped` are levers that were seen not to work here, with the reason.
    """
    trials: list[Trial] = []
    for lever in LEVERS:
        verdict: Verdict = "not tried"
        why = (dropped or {}).get(lever.name) or lever.why_not(facts.target, plan)
        if why is None and lever.rule is None:
            why = "no rule proposes it; `loop.tune` tries it"
        elif why is None and lever.rule is not None:
            verdict = "kept" if lever.rule.holds(facts) else verdict
            why = lever.rule.when if verdict == "kept" else f"it is for where {lever.rule.when}"
            plan = lever.pull(plan) if verdict == "kept" else plan
        elif lever.name in (dropped or {}):
            verdict = "dropped"
        trials.append(Trial(lever.name, lever.tier, verdict, why or ""))
    return Proposal(plan, tuple(trials))
