"""The search: it keeps what is measurably faster, pays back and stays true, and says why it dropped the rest."""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hotloop.levers import LEVERS, Lever, LeverTarget, levers_of
from hotloop.plan import Plan, Trial
from hotloop.tune.trial import PlanComparison, Refused, Search

from ..thorough import tries

PLAIN = Plan("cpu")
ROUNDS = 5


def with_obstacle(lever: Lever, why: str | None) -> Lever:
    """The lever as it is, but for what stands in its way."""
    changed = copy(lever)
    changed.needs_cuda = False
    changed.obstacle = changed.impossible = lambda target, plan: why  # type: ignore[method-assign]
    return changed


FREE: dict[str, Lever] = {lever.name: with_obstacle(lever, None) for lever in LEVERS if lever.tier != "C"}
# Those that neither contain nor exclude each other.
APART = ["pinned memory", "cudnn benchmark", "graph", "bf16", "tf32", "channels last", "fused", "checkpointing"]
FAR = "the loss is 5.0% from that of fp32; 2.0% is allowed"
GAINS = [0.5, 0.9, 0.98, 1.0, 1.005, 1.02, 1.3, 2.0, 7.0]


@dataclass
class World:
    """A contest in which every lever has a gain that is known; nothing is run."""

    gains: dict[str, float] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)  # what does not pass the gate
    refusals: dict[str, str] = field(default_factory=dict)
    together: dict[frozenset[str], float] = field(default_factory=dict)  # a gain that only several give
    plain: float = 1.0  # seconds of a step
    wobble: Callable[[int], float] = lambda number: 1.0
    pass_time: Callable[[float], None] = lambda seconds: None
    asked: list[str] = field(default_factory=list)
    gated: list[list[str]] = field(default_factory=list)

    def seconds(self, plan: Plan) -> float:
        pulled = set(levers_of(plan))
        extra = [gain for names, gain in self.together.items() if names <= pulled]
        return self.plain / math.prod([*(self.gains.get(name, 1.0) for name in pulled), *extra])

    def compare(self, plan: Plan, other: Plan) -> PlanComparison:
        name = next(name for name, lever in FREE.items() if lever.pull(plan) == other)
        self.asked.append(name)
        cost = self.costs.get(name, 0.0)
        self.pass_time(1.0 + cost)
        if name in self.refusals:
            raise Refused(self.refusals[name])
        after = tuple(self.seconds(other) * self.wobble(number) for number in range(ROUNDS))
        return PlanComparison((self.seconds(plan),) * ROUNDS, after, cost)

    def gate(self, plan: Plan) -> str | None:
        self.gated.append(levers_of(plan))
        rounding = {name for name in levers_of(plan) if FREE[name].tier == "B"}
        return FAR if self.wrong & rounding else None


def search(world: World, *, steps: int | None = 1_000_000, budget: float = 100.0, **options: Any) -> Search:
    model = nn.Linear(1, 1)
    scene = LeverTarget(torch.device("cpu"), model, [torch.optim.SGD(model.parameters())])
    return Search(world, scene, PLAIN, steps, budget, world.plain, **options)  # type: ignore[arg-type]


def tuned(world: World, *names: str, **options: Any) -> Search:
    """A search that has run over some levers."""
    hunt = search(world, **options)
    best = hunt.run([FREE[name] for name in names])
    assert best == hunt.best
    return hunt


def trial(hunt: Search, name: str) -> Trial:
    (one,) = [each for each in hunt.trials if each.lever == name]
    return one


def kept(hunt: Search) -> list[str]:
    return [each.lever for each in hunt.trials if each.verdict == "kept"]


def product(names: list[str]) -> Plan:
    plan = PLAIN
    for name in names:
        plan = FREE[name].pull(plan)
    return plan


@pytest.mark.parametrize(
    ("gain", "says"), [(1.5, FREE["fused"].what), (1.0, "noise"), (1.009, "noise"), (0.995, "noise"), (0.7, "slower")]
)
def test_what_is_faster_is_kept(gain: float, says: str) -> None:
    hunt, kept_it = tuned(World({"fused": gain}), "fused"), gain == 1.5
    assert hunt.best == replace(PLAIN, fused=kept_it)
    assert hunt.step == pytest.approx(1 / 1.5 if kept_it else 1.0)
    told = trial(hunt, "fused")
    assert (told.verdict, told.tier) == ("kept" if kept_it else "dropped", "B")
    assert says in told.why
    assert told.gain == told.low == told.high == pytest.approx(gain)
    assert told.step == pytest.approx(1 / gain)


@pytest.mark.parametrize(("slow_rounds", "verdict"), [(0, "kept"), (1, "kept"), (2, "dropped")])
def test_a_gain_must_show_in_all_rounds_but_one(slow_rounds: int, verdict: str) -> None:
    hunt = tuned(World({"fused": 1.2}, wobble=lambda number: 1.5 if number < slow_rounds else 1.0), "fused")
    assert trial(hunt, "fused").verdict == verdict
    if slow_rounds:
        assert trial(hunt, "fused").low == pytest.approx(1.2 / 1.5)


@pytest.mark.parametrize("gain", [3.0, 0.5])
def test_what_was_slow_is_tried_again_after_something_else_was_kept(gain: float) -> None:
    """It is told once: where it is slow again, as it was first."""
    world = World({"pinned memory": 0.9, "bf16": 2.0}, together={frozenset(["pinned memory", "bf16"]): gain})
    hunt = tuned(world, "pinned memory", "bf16")
    assert world.asked == ["pinned memory", "bf16", "pinned memory"]
    assert kept(hunt) == (["bf16", "pinned memory"] if gain > 1 else ["bf16"])
    assert trial(hunt, "pinned memory").gain == pytest.approx(2.7 if gain > 1 else 0.9)


def test_data_that_lives_on_the_device_is_kept_where_it_does_no_harm() -> None:
    assert kept(tuned(World({"resident": 0.98}), "resident")) == ["resident"]
    assert kept(tuned(World({"resident": 0.9}), "resident")) == []
    assert kept(tuned(World({"pinned memory": 0.98}), "pinned memory")) == [], "others must bring something"


@pytest.mark.parametrize(("steps", "verdict"), [(1000, "kept"), (99, "dropped"), (None, "kept")])
def test_a_lever_pays_back_within_the_run(steps: int | None, verdict: str) -> None:
    """It saves half a second in each step and costs fifty; in a run of unknown length nothing speaks against it."""
    told = trial(tuned(World({"graph": 2.0}, costs={"graph": 50.0}), "graph", steps=steps), "graph")
    assert (told.verdict, told.cost) == (verdict, 50.0)
    assert ("costs 50.00 s" in told.why and "save 49.50 s" in told.why) == (verdict == "dropped")


@pytest.mark.parametrize(
    ("steps", "tried", "says"),
    [
        (None, [], "length of the run is not known"),
        (5, [], "would not pay back in a run of 5.00 s"),
        (150, ["compile"], ""),
        (1000, ["compile", "max-autotune"], ""),  # of which less is hoped for
    ],
)
def test_a_compilation_is_tried_where_it_may_pay(
    steps: int | None, tried: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.tune.trial.expected_seconds", lambda model, kind: SimpleNamespace(seconds=20.0))
    world = World({"compile": 1.5, "max-autotune": 1.2})
    hunt = tuned(world, "compile", "max-autotune", steps=steps)
    assert world.asked == tried
    told = trial(hunt, "compile")
    assert told.verdict == ("kept" if tried else "not tried")
    assert tried or says in told.why


def test_the_gate_drops_what_rounds_too_much_and_is_not_asked_about_what_does_not_round() -> None:
    world = World({"bf16": 3.0, "pinned memory": 2.0}, wrong={"bf16", "pinned memory"})
    hunt = tuned(world, "bf16", "pinned memory")
    assert kept(hunt) == ["pinned memory"]
    told = trial(hunt, "bf16")
    assert (told.verdict, told.why, told.gain) == ("dropped", FAR, pytest.approx(3.0))
    assert world.gated == [["bf16"]]
    assert world.asked == ["bf16", "pinned memory"], "what is wrong is not tried again"


PINNED, LONG = ["pinned memory", "bf16", "tf32"], {"costs": {"compile": 60.0}}
BUDGETS: dict[str, tuple[dict[str, Any], list[str], float, list[str]]] = {  # what is known, the levers, seconds, tried
    "a second each": ({}, ["fused", "bf16", "tf32", "graph"], 3.0, ["fused", "bf16", "tf32"]),
    "refusals take time": ({"refusals": dict.fromkeys(PINNED, "no")}, PINNED, 2.0, PINNED[:2]),
    "so do second trials": ({"gains": {"bf16": 2.0}}, PINNED[:2], 2.0, PINNED[:2]),
    "compilations take none": ({"gains": {"compile": 2.0}, **LONG}, ["compile", "graph"], 2.0, ["compile", "graph"]),
    "nor do they need any": ({"gains": {"compile": 2.0}}, ["bf16", "tf32", "compile"], 1.0, ["bf16", "compile"]),
}


@pytest.mark.parametrize(("known", "names", "budget", "tried"), BUDGETS.values(), ids=BUDGETS)
def test_the_time_for_tuning_is_kept(
    known: dict[str, Any], names: list[str], budget: float, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]  # which only the contest moves
    monkeypatch.setattr("hotloop.tune.trial.time", SimpleNamespace(perf_counter=lambda: sum(clock)))
    world = World(pass_time=clock.append, **known)
    hunt = tuned(world, *names, budget=budget)
    assert world.asked == tried
    assert all("used up" in trial(hunt, name).why for name in set(names) - set(tried))


def test_what_cannot_be_pulled_or_run_is_told_and_the_search_goes_on() -> None:
    world = World(dict.fromkeys(FREE, 2.0), refusals={"pinned memory": "the host waits for the device: train.py:7"})
    hunt = search(world)
    hunt.run([with_obstacle(FREE["fused"], "not here"), FREE["pinned memory"], FREE["bf16"]])
    told = {each.lever: (each.verdict, each.why, each.gain) for each in hunt.trials}
    assert told["fused"] == ("not tried", "not here", None)
    assert told["pinned memory"] == ("dropped", "the host waits for the device: train.py:7", None)
    assert kept(hunt) == ["bf16"]
    assert world.asked == ["pinned memory", "bf16"], "what was refused is not tried again"


@pytest.mark.parametrize(("step", "order"), [(0.01, ["graph", "bf16", "fused"]), (1.0, ["bf16", "fused", "graph"])])
def test_a_slow_step_is_recorded_last(step: float, order: list[str]) -> None:
    """Launches are a small part of it, until something has made it fast."""
    world = World({"bf16": 2.0, "graph": 2.0, "fused": 2.0}, plain=step)
    assert kept(tuned(world, "graph", "bf16", "fused")) == order == world.asked


@settings(deadline=None, max_examples=tries(10, 200))
@given(st.dictionaries(st.sampled_from(APART), st.sampled_from(GAINS)), st.permutations(APART))
def test_of_levers_that_stand_apart_exactly_the_good_ones_are_kept(gains: dict[str, float], order: list[str]) -> None:
    hunt = tuned(World(gains), *order)
    good = [name for name in order if gains.get(name, 1.0) > 1.01]
    assert hunt.best == product(good)
    assert sorted(kept(hunt)) == sorted(good)
    assert hunt.step == pytest.approx(1 / math.prod(gains[name] for name in good))
    assert sorted(each.lever for each in hunt.trials) == sorted(order), "each is told of once"


@settings(deadline=None, max_examples=tries(10, 200))
@given(
    gains=st.dictionaries(st.sampled_from(sorted(FREE)), st.sampled_from(GAINS)),
    together=st.dictionaries(st.frozensets(st.sampled_from(APART), min_size=2, max_size=3), st.sampled_from(GAINS)),
    costs=st.dictionaries(st.sampled_from(sorted(FREE)), st.sampled_from([0.0, 1.0, 1e7])),
    wrong=st.sets(st.sampled_from(sorted(FREE))),
    refused=st.sets(st.sampled_from(sorted(FREE))),
    order=st.permutations(sorted(FREE)),
    steps=st.none() | st.integers(1, 10**6),
)
def test_the_plan_is_the_product_of_what_was_kept(
    gains: dict[str, float],
    together: dict[frozenset[str], float],
    costs: dict[str, float],
    wrong: set[str],
    refused: set[str],
    order: list[str],
    steps: int | None,
) -> None:
    """Whatever the levers give, alone and together: the record tells the whole way from the plain plan to the best."""
    world = World(gains, costs, wrong, dict.fromkeys(refused, "no"), together)
    hunt = tuned(world, *order, steps=steps, budget=math.inf)
    assert hunt.best == product(kept(hunt))
    assert sorted(each.lever for each in hunt.trials) == sorted(order)
    assert hunt.step == pytest.approx(world.seconds(hunt.best))
    assert not refused & set(kept(hunt))
    assert not {name for name in wrong if FREE[name].tier == "B"} & set(kept(hunt))
    for each in hunt.trials:
        if each.verdict == "kept":
            assert each.gain > (0.97 if each.lever == "resident" else 1.01)
            if steps is not None and each.lever != "resident":
                saved = (each.gain - 1) * (each.step or 0) * steps
                assert saved * 1.001 >= costs.get(each.lever, 0)
