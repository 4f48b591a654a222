"""A wrong argument is one clear error at the beginning, with its fix."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import BadArgument, DeviceUnavailable, EmptyLoader

DATA = TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
LOADER = DataLoader(DATA, 4)


def loop(**options: Any) -> hotloop.Loop:
    model = nn.Linear(2, 1)
    given = {"optimizer": torch.optim.SGD(model.parameters(), 0.1), "loss": nn.MSELoss(), **options}
    return hotloop.Loop(model, given.pop("optimizer"), given.pop("loss"), device="cpu", **given)


def another_scheduler() -> hotloop.Loop:
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)
    return loop(scheduler=torch.optim.lr_scheduler.StepLR(other, 1))


def loop_with(optimizer: Callable[[Any], Any], **options: Any) -> hotloop.Loop:
    model = nn.Linear(2, 1)
    return hotloop.Loop(model, optimizer(model.parameters()), device="cpu", **{"loss": None, **options})


def scheduled(kind: Callable[..., Any], schedule: Any = "step", **settings: Any) -> hotloop.Loop:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return hotloop.Loop(
        model, optimizer, nn.MSELoss(), device="cpu", scheduler=kind(optimizer, **settings), schedule=schedule
    )


class Wrapper(torch.optim.Optimizer):
    """As `accelerate` wraps an optimizer: of its kind, and without what one has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no optimizer": (lambda: loop(optimizer=None), "optimizer is a NoneType"),
    "the class of an optimizer": (lambda: loop(optimizer=torch.optim.SGD), "optimizer is the class SGD"),
    "an optimizer around another": (
        lambda: loop(optimizer=Wrapper(torch.optim.SGD([torch.ones(1)]))),
        r"Wrapper, which stands for another one\n.*`optimizer\.optimizer`",
    ),
    "a copy of a loop": (lambda: copy.deepcopy(loop()), r"cannot be copied or pickled\n.*copy its model"),
    "the class of a loss": (lambda: loop(loss=nn.MSELoss), r"loss=MSELoss is a class\n.*MSELoss\(\)"),
    "the class of a model": (lambda: hotloop.place(nn.Linear, "cpu"), "model is the class Linear"),
    "no loader to tune with": (lambda: loop().tune(5), "the loader is an int, which gives no batches"),
    "no loader to search with": (lambda: loop().largest_batch(5), "the loader is an int, which gives no batches"),
    "no loader": (lambda: loop().fit(None), "the loader is a NoneType, which gives no batches"),
    "a batch for a loader": (lambda: loop().fit(DATA.tensors), r"of shape \(8, 2\).*\n.*\[\(x, y\)\] for a single one"),
    "a number to evaluate with": (lambda: loop().fit(LOADER, validate=3), "validate= is an int"),
    "a number to transform with": (
        lambda: loop().fit(LOADER, device_transform=3),
        "device_transform is an int, which cannot be called",
    ),
    "half an accumulation": (lambda: loop(accumulate=1.5), "accumulate=1.5"),
    "a loss in words": (lambda: loop(loss="mse"), "loss='mse' cannot be called"),
    "epochs in words": (lambda: loop().fit(LOADER, epochs="3"), "epochs='3'"),
    "no epoch": (lambda: loop().fit(LOADER, epochs=0), "epochs=0"),
    "a loss and an objective": (lambda: loop(objective=lambda model, batch: batch), "give one"),
    "a negative norm": (lambda: loop(clip_norm=-1.0), "above 0"),
    "half an epoch": (lambda: loop().fit(LOADER, epochs=0.5), "epochs=0.5"),
    "metrics without data": (lambda: loop().fit(LOADER, metrics={"a": max}), "without validate"),
    "metrics in a list": (lambda: loop().evaluate(LOADER, [max]), "metrics is a list"),
    "the scheduler of another": (another_scheduler, "StepLR is of another optimizer"),
    "metrics in a list, for a run": (lambda: loop().fit(LOADER, validate=LOADER, metrics=[max]), "metrics is a list"),
    "a dataset to evaluate with": (lambda: loop().fit(LOADER, validate=DATA), "a TensorDataset, which gives items"),
    "nothing to evaluate with": (lambda: loop().fit(LOADER, validate=[]), "validate= gave no batch"),
    "too few items to evaluate with": (
        lambda: loop().fit(LOADER, validate=DataLoader(DATA, 9, drop_last=True)),
        "validate= gave no batch: its dataset has 8 items, fewer than batch_size=9",
    ),
    "an optimizer with a closure": (lambda: loop_with(torch.optim.LBFGS, accumulate=2), "go with accumulate=2"),
    "a closure and micro-batches": (lambda: loop_with(torch.optim.LBFGS, micro_batch=2), "micro_batch=2"),
    "a closure among several": (
        lambda: loop_with(lambda p: [torch.optim.LBFGS(each := [*p]), torch.optim.SGD(each, 0.1)]),
        "LBFGS.step needs a closure",
    ),
    "a schedule that is too short": (
        lambda: scheduled(OneCycleLR, max_lr=0.1, total_steps=3).fit(LOADER, epochs=2),
        r"ends after 3 steps, has made 0, and the run has 4 updates left\n.*total_steps=4",
    ),
    "a schedule of epochs that is too short": (
        lambda: scheduled(OneCycleLR, "epoch", max_lr=0.1, total_steps=3).fit(LOADER, epochs=4),
        "the run has 4 epochs left",
    ),
    "a plateau of what grows, without a metric": (
        lambda: scheduled(ReduceLROnPlateau, mode="max").fit(LOADER, validate=LOADER),
        "needs a metric to maximize, and there is no metric",
    ),
    "a plateau of what grows, with several": (
        lambda: scheduled(ReduceLROnPlateau, mode="max").fit(LOADER, validate=LOADER, metrics={"a": max, "b": min}),
        "there are 2 metrics: a, b",
    ),
    "a plan for nothing": (lambda: hotloop.Plan("no name!"), "device 'no name!'"),
    "a plan with half a switch": (lambda: hotloop.Plan("cpu", fused="yes"), "fused='yes'"),
    "a plan for another device": (lambda: loop(plan=hotloop.Plan("cuda")), "a plan for cuda, and a Loop on cpu"),
    "a dataset": (lambda: loop().fit(DATA), "a TensorDataset, which gives items"),
    "a dataset in a loop by hand": (lambda: next(loop().batches(DATA)), "a TensorDataset, which gives items"),
}


@pytest.mark.parametrize(("call", "said"), WRONG.values(), ids=WRONG)
def test_it_is_refused_with_a_fix(call: Callable[[], object], said: str) -> None:
    with pytest.raises((BadArgument, EmptyLoader), match=said) as refusal:
        call()
    assert "fix:" in str(refusal.value)


def test_a_schedule_counts_updates_and_not_batches() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    cycle = OneCycleLR(optimizer, 0.1, total_steps=6)
    made = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu", scheduler=cycle, accumulate=2)
    three = DataLoader(DATA, 3)  # three batches: one update of two, one of the last
    assert made.fit(three, epochs=3, progress=False).steps == 6
    with pytest.raises(BadArgument, match="has made 6, and the run has 2 updates left"):
        made.fit(three, progress=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU")
def test_a_plan_says_where_the_loop_runs() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(DeviceUnavailable, match="you asked for cuda, but"):
        hotloop.Loop(model, optimizer, nn.MSELoss(), plan=hotloop.Plan("cuda"))
    assert hotloop.Loop(model, optimizer, nn.MSELoss(), plan=hotloop.Plan("cpu")).device == torch.device("cpu")


@pytest.mark.parametrize(
    ("given", "bf16"),
    [("bf16-mixed", "bf16"), ("bfloat16", "bf16"), (torch.bfloat16, "bf16"), ("16-mixed", "fp16"), (32, "fp32")],
    ids=str,
)
def test_a_precision_goes_by_its_other_names_too(given: Any, bf16: str) -> None:
    assert loop(precision=given).plan.precision == bf16
    assert hotloop.Plan(precision=given) == hotloop.Plan(precision=bf16)
    with pytest.raises(BadArgument, match="unknown precision 'bf16-true'"):
        loop(precision="bf16-true")


def test_an_evaluation_takes_the_same_names() -> None:
    layer = nn.Linear(2, 1)
    assert hotloop.evaluate(layer, LOADER, {"bf16": seen}, precision="bf16-mixed") == {"bf16": 1.0}
    with pytest.raises(BadArgument, match="unknown precision 'bf8'"):
        hotloop.evaluate(layer, LOADER, precision="bf8")


def seen(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.dtype == torch.bfloat16) * torch.ones(len(target))


@pytest.mark.parametrize(
    ("argument", "fix"),
    [
        ("max_epochs", "loop.fit(…, epochs=…)"),
        ("epoch", "did you mean loop.fit(…, epochs=…)"),
        ("grad_clip", "Loop(…, clip_norm=…)"),
        ("clip_norm", "Loop(…, clip_norm=…)"),
        ("gradient_clip_val", "Loop(…, clip_norm=…)"),
        ("max_steps", 'on_step=lambda record: "stop" if record.step == … else None'),
        ("val_loader", "loop.fit(…, validate=…)"),
        ("xyzzy", "it has "),
    ],
)
def test_an_argument_of_another_library_is_told_by_the_name_it_has_here(argument: str, fix: str) -> None:
    if argument != "clip_norm":
        with pytest.raises(BadArgument, match=f"Loop has no argument '{argument}'") as caught:
            loop(**{argument: 1})
        assert fix in caught.value.fix or argument == "epoch"
    with pytest.raises(BadArgument, match=rf"loop\.fit has no argument '{argument}'") as caught:
        loop().fit(LOADER, **{argument: 1})
    assert fix in caught.value.fix


def test_weights_that_no_optimizer_holds_are_named_once_and_frozen_or_unused_ones_are_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].average = nn.Linear(2, 2)  # takes part in no step
    batch = (torch.ones(3, 2), torch.ones(3, 1))
    loop = hotloop.Loop(model, torch.optim.SGD(model[1].parameters(), 0.1), nn.MSELoss(), device="cpu")
    with pytest.warns(UserWarning, match=r"no optimizer of the loop holds 2 parameters.*0\.weight, 0\.bias") as told:
        loop.fit([batch] * 3, progress=False, monitor=False)
    assert len(told) == 1
    model[0].requires_grad_(False)
    model.zero_grad()
    hotloop.Loop(model, torch.optim.SGD(model[1].parameters(), 0.1), nn.MSELoss(), device="cpu").step(batch)


def test_a_setting_that_no_plan_has_is_named_where_a_file_holds_it(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{"precison": "bf16", "accumulate": 2}')
    with pytest.warns(UserWarning, match="left out: 'precison'; did you mean 'precision'"):
        made = loop(plan=file)
    assert (made.plan.accumulate, made.plan.precision) == (2, "fp32")
