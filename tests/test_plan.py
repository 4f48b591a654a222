"""`Plan`: only settings that can be meant."""

import json
from typing import Any

import pytest

from hotloop import Plan
from hotloop.errors import BadArgument


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"precision": "fp8"}, "fp32, bf16, fp16"),
        ({"accumulate": 0}, "at least 1"),
        ({"accumulate": -3}, "accumulate=-3"),
        ({"clip_norm": 0.0}, "above 0"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"clip_norm": float("nan")}, "clip_norm=nan"),
    ],
)
def test_bad_settings_say_what_is_good(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        Plan(device="cpu", **setting)


def test_to_json_and_back() -> None:
    plan = Plan(device="cuda:1", precision="bf16", accumulate=4, clip_norm=1.0)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
