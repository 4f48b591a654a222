"""`Plan`: only settings that can be meant."""

import dataclasses
import inspect
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hotloop import Loop, Plan
from hotloop.errors import BadArgument
from hotloop.plan import Trial, Tuning


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"precision": "fp8"}, "fp32, bf16, fp16"),
        ({"accumulate": 0}, "at least 1"),
        ({"accumulate": -3}, "accumulate=-3"),
        ({"clip_norm": 0.0}, "above 0"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"clip_norm": float("nan")}, "clip_norm=nan"),
        ({"recompute": "blocks.0"}, "the names of modules"),
        ({"levers": "toy"}, "the names of levers"),
        ({"levers": (1,)}, "the names of levers"),
    ],
)
def test_bad_settings_say_what_is_good(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        Plan(device="cpu", **setting)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"precison": "bf16"}, "no setting 'precison'\n  fix: did you mean 'precision'"),
        ({"clipnorm": 1.0}, "did you mean 'clip_norm'"),
        ({"zzz": 1}, "no setting 'zzz'\n  fix: The settings are: device, precision, accumulate"),
    ],
)
def test_a_setting_that_does_not_exist_is_told_with_the_nearest(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        Plan("cpu", **settings)
    with pytest.raises(BadArgument, match=says):
        dataclasses.replace(Plan("cpu"), **settings)


def test_editors_and_inspect_see_the_settings_by_name() -> None:
    assert list(inspect.signature(Plan).parameters) == [field.name for field in dataclasses.fields(Plan)]


def test_further_levers_are_named_in_any_order_and_old_files_name_none() -> None:
    plan = Plan("cpu", levers=("b", "a", "b"))
    assert plan == Plan("cpu", levers=("a", "b"))
    data = json.loads(json.dumps(plan.to_json()))
    assert data["levers"] == ["a", "b"]
    assert Plan.from_json(data) == plan
    assert plan.is_sound()
    del data["levers"]
    assert Plan.from_json(data) == Plan("cpu")


@given(
    st.sampled_from(["auto", "cpu", "cuda", "cuda:1"]),
    st.fixed_dictionaries(
        {},
        optional={
            "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
            "accumulate": st.integers(1, 8),
            "clip_norm": st.floats(0.1, 10),
            "graph": st.integers(0, 16),
            "recompute": st.lists(st.sampled_from(["blocks.0", "blocks.1"])).map(tuple),
            "split": st.sampled_from(["auto", "items", 1]),
            "levers": st.lists(st.sampled_from(["toy", "other"])).map(tuple),
        },
    ),
)
def test_a_plan_is_printed_as_it_would_be_written(device: str, settings: dict[str, Any]) -> None:
    plan = Plan(device, **settings)
    assert eval(repr(plan)) == plan  # noqa: S307


def test_a_tuning_and_a_loop_say_what_they_are() -> None:
    model = nn.Linear(4, 2)
    loop = Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.MSELoss(), device="cpu", plan="plain")
    assert repr(loop) == "Loop(Linear, SGD, plan=Plan('cpu', stream='direct'), steps=0)"
    trial = Trial("fused", "B", "dropped", "slower")
    told = str(Tuning(loop.plan, (trial,), 0.002, 0.001, 500, 3.2, "a CPU", "Linear", "2026-01-01", {}))
    assert told.splitlines() == [
        "Plan('cpu', stream='direct')",
        "2 times the plain loop; found in 3.20 s for a run of 500 steps on a CPU",
        "  dropped    fused: slower",
    ]
