"""The search: it keeps what is measurably faster, pays back and stays true, and says why it dropped the rest."""

import importlib
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
from hotloop.tune.search import PlanComparison, Refused, Search

from ..thorough import tries

PLAIN = Plan("cpu")
ROUNDS = 5


def with_obstacle(lever: Lever, why: str | None) -> Lever:
    """The lever as it is, but for what stands in its way."""
    changed = copy(lever)
    changed.obstacle = lambda target, plan: why  # type: ignore[method-assign]
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
    estimate: float = 10.0  # seconds of a compilation
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

    def gate(self, plan: Plan) -> tuple[float | None, str | None]:
        self.gated.append(levers_of(plan))
        rounding = {name for name in levers_of(plan) if FREE[name].tier == "B"}
        return (0.05, FAR) if self.wrong & rounding else (0.001, None)

    def compile_estimate(self, plan: Plan) -> float:
        return self.estimate


def search(world: World, *, steps: int | None = 1_000_000, budget: float = 100.0, **options: Any) -> Search:
    model = nn.Linear(1, 1)
    scene = LeverTarget(torch.device("cpu"), model, [torch.optim.SGD(model.parameters())])
    return Search(world, scene, PLAIN, steps, budget, step=world.plain, **options)


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


def test_what_is_faster_is_kept() -> None:
    hunt = tuned(World({"fused": 1.5}), "fused")
    assert hunt.best == replace(PLAIN, fused=True)
    assert hunt.step == pytest.approx(1 / 1.5)
    told = trial(hunt, "fused")
    assert (told.verdict, told.tier, told.why) == ("kept", "B", FREE["fused"].what)
    assert told.gain == told.low == told.high == pytest.approx(1.5)
    assert told.step == pytest.approx(1 / 1.5)
    assert told.drift == 0.001


@pytest.mark.parametrize(("gain", "says"), [(1.0, "noise"), (1.009, "noise"), (0.995, "noise"), (0.7, "slower")])
def test_what_is_not_faster_is_dropped(gain: float, says: str) -> None:
    hunt = tuned(World({"fused": gain}), "fused")
    assert hunt.best == PLAIN
    assert hunt.step == 1.0
    told = trial(hunt, "fused")
    assert told.verdict == "dropped"
    assert says in told.why
    assert told.gain == pytest.approx(gain)


@pytest.mark.parametrize(("slow_rounds", "verdict"), [(0, "kept"), (1, "kept"), (2, "dropped")])
def test_a_gain_must_show_in_all_rounds_but_one(slow_rounds: int, verdict: str) -> None:
    def wobble(number: int) -> float:
        return 1.5 if number < slow_rounds else 1.0

    hunt = tuned(World({"fused": 1.2}, wobble=wobble), "fused")
    assert trial(hunt, "fused").verdict == verdict
    if slow_rounds:
        assert trial(hunt, "fused").low == pytest.approx(1.2 / 1.5)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=9), st.floats(0.2, 5))
def test_a_comparison(after: list[float], gain: float) -> None:
    """The gain is that of the median round, and does not depend on their order or on the unit of time."""
    one = PlanComparison(tuple(seconds * gain for seconds in after), tuple(after), 0.0)
    assert one.gain == pytest.approx(gain)
    assert one.ratios == sorted(one.ratios)
    turned = PlanComparison(one.before[::-1], one.after[::-1], 0.0)
    assert (turned.gain, turned.is_above_noise()) == (one.gain, one.is_above_noise())
    if gain > 1.02 or gain < 1:
        assert one.is_above_noise() == (gain > 1)


def test_levers_build_on_each_other() -> None:
    world = World({"bf16": 2.0, "fused": 1.5, "pinned memory": 0.8})
    hunt = tuned(world, "pinned memory", "bf16", "fused")
    assert hunt.best == replace(PLAIN, precision="bf16", fused=True)
    assert hunt.step == pytest.approx(1 / 3)
    assert trial(hunt, "fused").gain == pytest.approx(1.5), "against the best so far, not against the plain plan"


def test_what_was_slow_is_tried_again_after_something_else_was_kept() -> None:
    world = World({"pinned memory": 0.9, "bf16": 2.0}, together={frozenset(["pinned memory", "bf16"]): 3.0})
    hunt = tuned(world, "pinned memory", "bf16")
    assert world.asked == ["pinned memory", "bf16", "pinned memory"]
    assert kept(hunt) == ["bf16", "pinned memory"]
    assert trial(hunt, "pinned memory").gain == pytest.approx(2.7)
    assert hunt.step == pytest.approx(1 / (2.0 * 2.7))


def test_what_is_slow_twice_is_told_once_and_as_it_was_first() -> None:
    world = World({"pinned memory": 0.9, "bf16": 2.0}, together={frozenset(["pinned memory", "bf16"]): 0.5})
    hunt = tuned(world, "pinned memory", "bf16")
    assert world.asked == ["pinned memory", "bf16", "pinned memory"]
    assert trial(hunt, "pinned memory").verdict == "dropped"
    assert trial(hunt, "pinned memory").gain == pytest.approx(0.9)


def test_nothing_is_tried_again_where_nothing_has_changed() -> None:
    world = World({"bf16": 2.0, "pinned memory": 0.9, "fused": 1.0})
    tuned(world, "bf16", "pinned memory", "fused")
    assert world.asked == ["bf16", "pinned memory", "fused"]


def test_data_that_lives_on_the_device_is_kept_where_it_does_no_harm() -> None:
    assert kept(tuned(World({"resident": 0.98}), "resident")) == ["resident"]
    assert kept(tuned(World({"resident": 0.9}), "resident")) == []
    assert kept(tuned(World({"pinned memory": 0.98}), "pinned memory")) == [], "others must bring something"


@pytest.mark.parametrize(("steps", "verdict"), [(1000, "kept"), (99, "dropped"), (None, "kept")])
def test_a_lever_pays_back_within_the_run(steps: int | None, verdict: str) -> None:
    """It saves half a second in each step and costs fifty; in a run of unknown length nothing speaks against it."""
    hunt = tuned(World({"graph": 2.0}, costs={"graph": 50.0}), "graph", steps=steps)
    told = trial(hunt, "graph")
    assert told.verdict == verdict
    assert told.cost == 50.0
    if verdict == "dropped":
        assert "costs 50.00 s" in told.why
        assert "save 49.50 s" in told.why


def test_a_compilation_is_not_tried_in_a_run_of_unknown_length() -> None:
    world = World({"compile": 5.0})
    hunt = tuned(world, "compile", steps=None)
    assert world.asked == []
    assert trial(hunt, "compile").verdict == "not tried"
    assert "length of the run is not known" in trial(hunt, "compile").why


@pytest.mark.parametrize(("steps", "tried"), [(5, False), (100, True)])
def test_a_compilation_is_not_tried_in_a_short_run(steps: int, tried: bool) -> None:
    world = World({"compile": 5.0}, estimate=20.0)
    hunt = tuned(world, "compile", steps=steps)
    assert (world.asked == ["compile"]) == tried
    assert (trial(hunt, "compile").verdict == "kept") == tried
    if not tried:
        assert "would not pay back in a run of 5.00 s" in trial(hunt, "compile").why


def test_the_run_counts_as_it_would_be_without_the_compilation() -> None:
    """What was kept before has made the run short, so that a compilation does not pay any more."""
    world = World({"bf16": 10.0, "compile": 1.5}, estimate=20.0)
    assert world.asked == []
    tuned(world, "compile", steps=100)
    assert world.asked == ["compile"]
    world.asked.clear()
    tuned(world, "bf16", "compile", steps=100)
    assert world.asked == ["bf16"]


def test_a_longer_compilation_must_promise_more() -> None:
    """A first one may give half as much again; of the next one less is hoped for."""
    world = World({"compile": 1.5, "max-autotune": 1.2}, estimate=20.0)
    tuned(world, "compile", "max-autotune", steps=150)
    assert world.asked == ["compile"]
    tuned(world, "compile", "max-autotune", steps=1000)
    assert world.asked == ["compile", "compile", "max-autotune"]


def test_the_gate_drops_what_rounds_too_much_and_is_not_asked_about_what_does_not_round() -> None:
    world = World({"bf16": 3.0, "pinned memory": 2.0}, wrong={"bf16", "pinned memory"})
    hunt = tuned(world, "bf16", "pinned memory")
    assert kept(hunt) == ["pinned memory"]
    told = trial(hunt, "bf16")
    assert (told.verdict, told.why, told.drift, told.gain) == ("dropped", FAR, 0.05, pytest.approx(3.0))
    assert world.gated == [["bf16"]]
    assert world.asked == ["bf16", "pinned memory"], "what is wrong is not tried again"


def test_what_is_not_worth_having_is_not_held_to_the_gate() -> None:
    world = World({"bf16": 1.0, "fused": 2.0}, costs={"fused": 1e9})
    hunt = tuned(world, "bf16", "fused")
    assert kept(hunt) == world.gated == []
    assert trial(hunt, "bf16").drift is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only the contest moves."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(
        importlib.import_module("hotloop.tune.search"), "time", SimpleNamespace(perf_counter=lambda: clock.now)
    )
    return clock


def timed_by(clock: SimpleNamespace, **options: Any) -> World:
    def pass_time(seconds: float) -> None:
        clock.now += seconds

    return World(pass_time=pass_time, **options)


def test_the_time_for_tuning_is_kept(clock: SimpleNamespace) -> None:
    world = timed_by(clock, gains={"pinned memory": 1.5, "fused": 1.5})
    hunt = tuned(world, "pinned memory", "bf16", "tf32", "fused", budget=3.0)  # each takes a second
    assert world.asked == ["pinned memory", "bf16", "tf32"]
    assert trial(hunt, "fused").verdict == "not tried"
    assert "used up" in trial(hunt, "fused").why
    assert hunt.spent == 3.0


def test_a_refusal_takes_time_too(clock: SimpleNamespace) -> None:
    world = timed_by(clock, refusals={"pinned memory": "no", "bf16": "no"})
    tuned(world, "pinned memory", "bf16", "tf32", budget=2.0)
    assert world.asked == ["pinned memory", "bf16"]


def test_a_compilation_is_not_paid_from_the_time_for_tuning(clock: SimpleNamespace) -> None:
    world = timed_by(clock, gains={"compile": 2.0, "graph": 2.0}, costs={"compile": 60.0})
    hunt = tuned(world, "compile", "graph", budget=2.0)
    assert world.asked == ["compile", "graph"]
    assert hunt.spent == 2.0


def test_a_compilation_is_tried_when_the_time_for_other_trials_is_used_up(clock: SimpleNamespace) -> None:
    world = timed_by(clock, gains={"compile": 2.0})
    tuned(world, "bf16", "tf32", "compile", budget=1.0)
    assert world.asked == ["bf16", "compile"]


def test_a_second_trial_needs_time_as_well(clock: SimpleNamespace) -> None:
    world = timed_by(clock, gains={"bf16": 2.0})
    hunt = tuned(world, "pinned memory", "bf16", budget=2.0)
    assert world.asked == ["pinned memory", "bf16"]
    assert trial(hunt, "pinned memory").verdict == "dropped", "what was measured is not forgotten"


def test_a_plan_that_cannot_run_is_dropped_with_the_reason_and_the_search_goes_on() -> None:
    world = World(
        {"bf16": 2.0, "pinned memory": 9.0}, refusals={"pinned memory": "the host waits for the device: train.py:7"}
    )
    hunt = tuned(world, "pinned memory", "bf16")
    assert kept(hunt) == ["bf16"]
    told = trial(hunt, "pinned memory")
    assert (told.verdict, told.why, told.gain) == ("dropped", "the host waits for the device: train.py:7", None)
    assert world.asked == ["pinned memory", "bf16"], "what was refused is not tried again"


def test_what_cannot_be_pulled_is_not_tried_and_told_why() -> None:
    world = World(dict.fromkeys(FREE, 5.0))
    hunt = search(world)
    best = hunt.run([with_obstacle(FREE["fused"], "not here"), FREE["graph"]])
    assert best == replace(PLAIN, graph=1)
    assert (trial(hunt, "fused").verdict, trial(hunt, "fused").why) == ("not tried", "not here")
    assert world.asked == ["graph"]


def test_what_changes_the_training_is_never_tried() -> None:
    world = World()
    hunt = search(world)
    hunt.run([lever for lever in LEVERS if lever.tier == "C"])
    assert world.asked == []
    assert {each.verdict for each in hunt.trials} == {"not tried"}


@pytest.mark.parametrize(("step", "order"), [(0.01, ["graph", "bf16", "fused"]), (1.0, ["bf16", "fused", "graph"])])
def test_a_slow_step_is_recorded_last(step: float, order: list[str]) -> None:
    """Launches are a small part of it, until something has made it fast."""
    world = World({"bf16": 2.0, "graph": 2.0, "fused": 2.0}, plain=step)
    assert kept(tuned(world, "graph", "bf16", "fused")) == order == world.asked


def test_what_is_tried_is_told() -> None:
    told: list[str] = []
    tuned(World(), "pinned memory", "compile", "fused", steps=None, tell=told.append)
    assert told == ["pinned memory", "fused"]


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
            assert each.gain is not None
            assert each.gain > (0.97 if each.lever == "resident" else 1.01)
            if steps is not None and each.lever != "resident":
                saved = (each.gain - 1) * (each.step or 0) * steps
                assert saved * 1.001 >= costs.get(each.lever, 0)
