"""A plan that is applied to a model belongs to one loop: another one on the same model finds it as it was."""

import copy
import dataclasses
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, prune
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.levers.applied import AppliedPlan
from hotloop.plan import Plan

PLAN = Plan("cpu", recompute=("0",), fused=True, channels_last=True)
OWN = {"fused": None, "foreach": None, "capturable": False}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


def network_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    return model, torch.optim.Adam(model.parameters(), 0.01)


def data() -> DataLoader[Any]:
    dice = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 3, 8, 8, generator=dice), torch.randint(4, (24,), generator=dice)
    return DataLoader(TensorDataset(x, y), 8)


def loop_of(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Any) -> hotloop.Loop:
    return hotloop.Loop(model, optimizer, nn.CrossEntropyLoss(), device="cpu", plan=plan)


def is_planned(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether all of the plan shows; it must be all or nothing."""
    weight = model[0].weight
    shows = {
        "forward" in vars(model[0]),
        bool(optimizer.param_groups[0]["fused"]),
        weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous(),
    }
    assert len(shows) == 1, "half of a plan"
    return shows.pop()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_plain_loop_after_another_one_is_a_loop_by_hand(is_there: bool) -> None:
    model, optimizer = network_and_optimizer()
    first = loop_of(model, optimizer, PLAN)
    first.fit(data(), epochs=1, progress=False)
    assert is_planned(model, optimizer)
    other = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    by_hand = torch.optim.Adam(other.parameters(), 0.01)
    by_hand.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if not is_there:
        gone = weakref.ref(first._core)
        del first
        gc.collect()
        assert gone() is None
    loop_of(model, optimizer, "plain").fit(data(), epochs=2, progress=False)
    assert not is_planned(model, optimizer)
    assert {name: optimizer.param_groups[0][name] for name in OWN} == OWN
    for _ in range(2):
        for x, y in data():
            by_hand.zero_grad()
            nn.functional.cross_entropy(other(x), y).backward()
            by_hand.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_loop_that_goes_on_has_its_plan_again() -> None:
    model, optimizer = network_and_optimizer()
    first = loop_of(model, optimizer, PLAN)
    second = loop_of(model, optimizer, "plain")
    assert not is_planned(model, optimizer)
    first.fit(data(), epochs=1, progress=False)
    assert is_planned(model, optimizer)
    second.fit(data(), epochs=1, progress=False)
    first.step(next(iter(data())))
    assert is_planned(model, optimizer)
    assert first.plan == PLAN


def test_loops_that_take_turns_both_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[AppliedPlan] = []
    apply: Callable[[AppliedPlan], None] = AppliedPlan.apply
    monkeypatch.setattr(AppliedPlan, "apply", lambda self: applied.append(self) or apply(self))
    model, optimizer = network_and_optimizer()
    loops = [loop_of(model, optimizer, PLAN) for _ in range(2)]
    for batch in data():
        for loop in loops:
            loop.step(batch)
    assert len(applied) == 3, "the first one once more, and then no longer"
    third = loop_of(model, optimizer, "plain")
    assert not is_planned(model, optimizer)
    assert [name for name, layer in model.named_modules() if "forward" in vars(layer)] == []
    assert third.plan.fused is False


def test_what_a_person_has_put_in_its_place_stays() -> None:
    model = network()
    loop_of(model, torch.optim.SGD(model.parameters(), 0.1), PLAN)
    own = model[0].forward = lambda x: x.new_ones(len(x), 8, 2, 2)
    loop_of(model, torch.optim.SGD(model.parameters(), 0.1), "plain")
    assert model[0].forward is own


def test_a_copy_of_a_model_is_trained_as_its_original() -> None:
    model = network()
    loop_of(model, torch.optim.Adam(model.parameters(), 0.01), PLAN)
    other = copy.deepcopy(model)
    optimizer = torch.optim.Adam(other.parameters(), 0.01)
    loop_of(other, optimizer, "plain")
    assert "forward" not in vars(other[0])
    loop_of(other, optimizer, PLAN)
    assert is_planned(other, optimizer)


def test_a_model_is_freed_with_its_plan() -> None:
    model, optimizer = network_and_optimizer()
    loop = loop_of(model, optimizer, PLAN)
    loop.fit(data(), epochs=1, progress=False)
    there = [weakref.ref(each) for each in (model, optimizer, loop._core.switch.step.levers)]
    del model, optimizer, loop
    gc.collect()
    assert [each() for each in there] == [None] * 3


def test_between_fits_a_model_whose_plan_nobody_asked_for_is_as_it_was() -> None:
    model, optimizer = network_and_optimizer()
    loop = loop_of(model, optimizer, "auto")
    loop._core.switch.carry_out(PLAN, "as the tuner would")
    planned: list[bool] = []
    for _ in range(2):
        loop.fit(data(), epochs=1, progress=False, on_step=lambda record: planned.append(is_planned(model, optimizer)))
        assert not is_planned(model, optimizer)
        prune.l1_unstructured(model[0], "weight", 0.5)  # flattens the weight by `view`
        prune.remove(model[0], "weight")
        parameters_to_vector(model.parameters())
        assert copy.deepcopy(optimizer).param_groups[0]["fused"] is None
    assert planned == [True] * 6
    assert loop.plan == PLAN
    loop.step(next(iter(data())))
    assert is_planned(model, optimizer)


LOOKS: dict[str, Callable[[hotloop.Loop], object]] = {
    "memory": lambda loop: loop.memory(next(iter(data()))),
    "profile": lambda loop: loop.profile(data(), steps=2, progress=False),
    "largest_batch": lambda loop: loop.largest_batch(data(), limit=8, seconds=0.1),
    "load_state_dict": lambda loop: loop.load_state_dict(loop.state_dict()),
    "tune": lambda loop: loop.tune(data(), steps=3, progress=False),
}


@pytest.mark.parametrize("look", LOOKS)
def test_between_fits_it_stays_so_whatever_is_looked_at(look: str) -> None:
    model, optimizer = network_and_optimizer()
    loop = loop_of(model, optimizer, "auto")
    loop._core.switch.carry_out(PLAN, "as the tuner would")
    loop.fit(data(), epochs=1, progress=False)
    LOOKS[look](loop)
    assert not is_planned(model, optimizer)


def test_a_plan_that_was_loaded_or_found_waits_for_the_next_step() -> None:
    plan = dataclasses.replace(PLAN, recompute=())  # which a checkpoint leaves to the loop that loads it
    models, optimizers = zip(network_and_optimizer(), network_and_optimizer(), strict=True)
    first, second = (loop_of(*pair, "auto") for pair in zip(models, optimizers, strict=True))
    first._core.switch.carry_out(plan, "as the tuner would")
    first.fit(data(), epochs=1, progress=False)
    second.load_state_dict(first.state_dict())
    assert second.plan == plan
    assert not optimizers[1].param_groups[0]["fused"]
    assert models[1][0].weight.is_contiguous()
    second.step(next(iter(data())))
    assert optimizers[1].param_groups[0]["fused"]
    assert models[1][0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_look_at_a_loop_finds_no_plan_of_another() -> None:
    model, optimizer = network_and_optimizer()
    first, second = loop_of(model, optimizer, PLAN), loop_of(model, optimizer, PLAN)
    first.memory(next(iter(data())))
    assert not is_planned(model, optimizer)
    for loop in (first, second):
        loop.step(next(iter(data())))
        assert is_planned(model, optimizer)


def test_a_hook_that_cannot_flatten_weights_is_told_why() -> None:
    model = network()
    loop = loop_of(model, torch.optim.SGD(model.parameters(), 0.1), PLAN)
    with pytest.raises(RuntimeError, match="view size") as raised:
        loop.fit(data(), progress=False, on_epoch=lambda record: parameters_to_vector(model.parameters()) and None)
    assert "use reshape in on_epoch" in raised.value.__notes__[0]


def test_a_copy_of_a_model_with_a_plan_can_be_scripted() -> None:
    model = network()
    loop_of(model, torch.optim.SGD(model.parameters(), 0.1), PLAN)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = next(iter(data()))[0]
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        scripted = torch.jit.script(other)
        torch.testing.assert_close(scripted(x), model(x))
        with torch.no_grad():
            other[0].weight.zero_()
        assert not torch.equal(other(x), model(x)), "it computes with the weights of another"
