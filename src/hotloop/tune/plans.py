"""The plan that a person gives, as an object or a file, and the parts of it that work here."""

import json
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from hotloop.errors import BadArgument, PlanWarning
from hotloop.levers import LEVERS, Lever, pulled_levers, uncaptured
from hotloop.levers.cuda_graph import MOST_STEPS
from hotloop.levers.fused import wrong_fused_kernel
from hotloop.plan import Plan, did_you_mean
from hotloop.printing.text import printable
from hotloop.tune.subject import Subject

# What a person asks for and the tuner may not change.
ASKED = (
    "precision",
    "accumulate",
    "clip_norm",
    "clip_value",
    "micro_batch",
    "workers",
    "recompute",
    "split",
    "parallel",
    "sync_batchnorm",
)


def plan_of(plan: Plan | Path | str, subject: Subject, asked: dict[str, Any]) -> Plan:
    """The first plan of a run, from a word, a `Plan` or the path of one.

    `asked`: settings given beside it.
    """
    for optimizer in subject.optimizers:
        if any(group.get("fused") for group in optimizer.param_groups) and (why := wrong_fused_kernel(optimizer)):
            words = (
                f"{type(optimizer).__name__} was built with fused=True, but {why}. Without that it trains as it should"
            )
            warnings.warn(words, PlanWarning, stacklevel=4)
    if isinstance(plan, str) and plan == "auto":
        return _first_plan(subject)
    if isinstance(plan, str) and plan == "plain":
        return replace(subject.plan, stream="direct")
    if not isinstance(plan, Plan | Path | str):
        raise BadArgument(f"plan={plan!r}", fix=_PLANS)
    from_file = not isinstance(plan, Plan)
    chosen = plan if isinstance(plan, Plan) else read_plan(plan)
    here = subject.plan.device
    if not from_file and chosen.device != "auto" and not _is_same(torch.device(chosen.device), subject.device):
        raise BadArgument(
            f"a plan for {chosen.device}, and a Loop on {here}",
            fix=f'give one of them: Plan("{here}", …), or Loop(…, plan=plan) without device=',
        )
    chosen = replace(chosen, device=here)
    for name, value in asked.items():
        if value != getattr(chosen, name):
            raise BadArgument(
                f"{name}={value!r} and a plan with {name}={getattr(chosen, name)!r}", fix="give one of them"
            )
    for lever, why in _obstacles(chosen, subject):
        if not from_file:
            raise BadArgument(f"the plan has {lever.name}: {why}", fix="leave it out of the plan")
        warnings.warn(f"{plan} has {lever.name}, which is left out here: {why}", PlanWarning, stacklevel=4)
    return _without_obstacles(chosen, subject)


def _first_plan(subject: Subject) -> Plan:
    """The plan of a run of which nothing is known yet."""
    plan, scene = replace(subject.plan, stream="auto"), subject.scene(None)
    for lever in LEVERS:
        if scene.device.type in lever.begins_on and lever.why_not(scene, plan) is None:
            plan = lever.pull(plan)
    return plan


def _is_same(there: torch.device, here: torch.device) -> bool:
    return there.type == here.type and there.index in (None, here.index or 0)


def possible(plan: Plan, subject: Subject) -> Plan:
    """A plan from elsewhere, without the levers that cannot work here."""
    plan = _without_obstacles(plan, subject)
    return replace(plan, graph=min(plan.graph, MOST_STEPS))


def _without_obstacles(plan: Plan, subject: Subject) -> Plan:
    there = plan
    for lever, _ in _obstacles(plan, subject):
        there = lever.off(there)
    return uncaptured(there) if plan.graph and not there.graph else there


def _obstacles(plan: Plan, subject: Subject) -> list[tuple[Lever, str]]:
    """The levers of a plan that cannot work here, each with the reason."""
    scene = replace(subject.scene(None), why_not_resident=None)
    return [(lever, why) for lever in pulled_levers(plan) if (why := lever.impossible(scene, plan))]


def read_plan(path: str | Path) -> Plan:
    """The plan in a file of a tuning, or of a plan alone."""
    try:
        data = json.loads(Path(path).read_text())
        settings = data.get("plan", data)
        plan = Plan.from_json(settings)
    except OSError as error:
        raise BadArgument(f"plan={str(path)!r} cannot be read: {error.strerror}", fix=_PLANS) from error
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        what = error.what if isinstance(error, BadArgument) else str(error)
        raise BadArgument(f"{path} holds no plan: {what}", fix="write it with `hotloop tune --out`") from error
    names = [field.name for field in fields(Plan)]
    for name in settings.keys() - {*names}:
        meant = did_you_mean(name, names).strip() or "a plan of another version?"
        what = f"{path} has a setting that no plan has, and it is left out: {printable(name)!r}; {meant}"
        warnings.warn(what, PlanWarning, stacklevel=4)
    return plan


_PLANS = 'choose "auto", "plain", a Plan, or the file of one'
