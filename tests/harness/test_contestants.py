"""Every contestant trains: the loss goes down, and where the sums are the same, so is the result."""

import sys
from pathlib import Path

import pytest
import torch

from harness.contestants import NAMES, DoesNotApply, contestants
from harness.contestants.hot import in_words
from harness.packages import MissingPackage
from harness.workloads import APPLICATIONS, RACED, UNSEEN, workload
from hotloop.errors import BadArgument
from hotloop.plan import Plan

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


def test_the_trainer_says_what_it_does_not_train() -> None:
    with pytest.raises(DoesNotApply, match="its own models"):
        contestants(["trainer"])["trainer"](workload("mlp", "cpu", quick=True).parts(), CPU)


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


def test_a_workload_without_an_expert_says_so(tmp_path: Path) -> None:
    start = contestants(["expert"], experts=tmp_path)["expert"]
    with pytest.raises(BadArgument, match=r"mlp\.py"):
        start(workload("mlp", "cpu", quick=True).parts(), CPU)


@pytest.mark.parametrize(("name", "package"), [("accelerate", "accelerate"), ("lightning", "lightning")])
def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=f"pip install {package}"):
        contestants([name])[name](workload("mlp", "cpu", quick=True).parts(), CPU)


def test_who_does_not_exist_is_told() -> None:
    with pytest.raises(BadArgument, match="lightning"):
        contestants(["lightening"])
    with pytest.raises(BadArgument, match="--expert"):
        contestants(["expert"])
    with pytest.raises(BadArgument, match="plan for nan"):
        contestants(plan_for=float("nan"))
    assert "expert" not in contestants()


def test_a_plan_in_words_leaves_nothing_out() -> None:
    assert in_words(Plan(device="cpu")) == "fp32"
    plan = Plan("cuda:0", "bf16", stream="prefetched", fused=True, channels_last=True, compile="max-autotune", graph=1)
    words = "bf16, fused optimizer, channels_last, batches copied ahead, compiled (max-autotune), graph of one step"
    assert in_words(plan) == words
