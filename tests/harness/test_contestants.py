"""Every contestant trains: the loss goes down, and where the sums are the same, so is the result."""

import sys

import pytest
import torch

from harness.contestants import NAMES, contestants
from harness.workloads import APPLICATIONS, RACED, UNSEEN, workload
from hotloop.errors import BadArgument

from ..thorough import some
from .racing import CPU, EXPERTS, loss_of, needs_packages_of


@pytest.mark.parametrize("name", [name for name in NAMES if name != "trainer"])
def test_each_one_trains(name: str) -> None:
    needs_packages_of(name)
    work = workload("mlp", "cpu", quick=True)
    parts = work.parts()
    before = loss_of(work, parts)
    started = contestants([name], experts=EXPERTS, plan_for=1)[name](parts, CPU)
    assert started.run(2) > 0
    assert started.run(6) > 0
    assert loss_of(work, parts) < 0.85 * before


@pytest.mark.parametrize("name", ["careful", "accelerate", "fabric", "hotloop"])
def test_on_a_cpu_the_weights_are_those_of_the_tutorial(name: str) -> None:
    needs_packages_of(name)
    work = workload("mlp", "cpu", quick=True)
    ends = []
    for contestant in ("tutorial", name):
        parts = work.parts()
        contestants([contestant], plan_for=1)[contestant](parts, CPU).run(2)
        ends.append(torch.cat([weight.detach().flatten() for weight in parts.model.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)  # a fused optimizer rounds differently


# Only what has several updates or a state of its own; models that give their loss are in `test_end_to_end.py`.
@pytest.mark.parametrize("name", ["tutorial", "careful"])
@pytest.mark.parametrize("trained", some([*APPLICATIONS, *UNSEEN], ["dcgan", "lstm"]))
def test_loops_by_hand_train_every_application(name: str, trained: str) -> None:
    needs_packages_of(trained)
    parts = workload(trained, "cpu", quick=True).parts()
    before = [weight.detach().clone() for weight in parts.model.parameters() if weight.requires_grad]
    started = contestants([name])[name](parts, CPU)
    assert started.run(1) > 0
    after = [weight for weight in parts.model.parameters() if weight.requires_grad]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert started.steps is not None
    losses = next(started.steps())
    assert len(losses) == len(parts.updates)
    assert all(bool(loss.isfinite()) for loss in losses)


@pytest.mark.parametrize("trained", ["bert", "llama", "gpt2"])
def test_the_trainer_of_hugging_face_trains_its_own_models(trained: str, capsys: pytest.CaptureFixture[str]) -> None:
    needs_packages_of("trainer")
    work = workload(trained, "cpu", quick=True)
    parts = work.parts()
    before = loss_of(work, parts)
    started = contestants(["trainer"])["trainer"](parts, CPU)
    assert started.run(1) > 0
    assert started.run(3) > 0
    assert loss_of(work, parts) < before
    assert not capsys.readouterr().out


def test_several_optimizers_are_left_to_loops_that_have_them() -> None:
    needs_packages_of("accelerate")
    with pytest.raises(BadArgument, match="several optimizers"):
        contestants(["accelerate"])["accelerate"](workload("dcgan", "cpu", quick=True).parts(), CPU)


@pytest.mark.parametrize("name", [name for name in RACED if name != "gpt2"])  # which is in `test_workloads.py`
def test_an_expert_has_a_loop_for_each_workload(name: str) -> None:
    needs_packages_of(name)
    work = workload(name, "cpu", quick=True)
    parts = work.parts()
    before = loss_of(work, parts)
    run = contestants(["expert"], experts=EXPERTS)["expert"](parts, CPU).run
    assert run(3) > 0
    assert loss_of(work, parts) < before


def test_experts_leave_no_module_and_no_path_behind() -> None:
    before = list(sys.path)
    contestants(["expert"], experts=EXPERTS)["expert"](workload("mlp", "cpu", quick=True).parts(), CPU)
    assert sys.path == before
    assert "steps" not in sys.modules


def test_who_does_not_exist_is_told() -> None:
    with pytest.raises(BadArgument, match="lightning"):
        contestants(["lightening"])
    with pytest.raises(BadArgument, match="--expert"):
        contestants(["expert"])
    with pytest.raises(BadArgument, match="plan for nan"):
        contestants(plan_for=float("nan"))
    assert "expert" not in contestants()
