"""A plan with a CUDA graph on ranks: what is said of it, and what is left of a file of one. `uncaptured.py FOLDER`."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hotloop
from hotloop.errors import BadArgument


def loop_of(plan: Any) -> hotloop.Loop:
    model = nn.Linear(2, 1)
    return hotloop.Loop(model, torch.optim.Adam(model.parameters()), nn.MSELoss(), device="cpu", plan=plan)


told: dict[str, Any] = {}
for graph in (1, 16):
    try:
        loop_of(hotloop.Plan("cpu", graph=graph))
    except BadArgument as error:
        told[f"graph={graph}"] = str(error)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    plan = loop_of(Path(sys.argv[1], "plan.json")).plan
print(json.dumps({**told, "left": plan.to_json(), "said": [str(each.message) for each in said]}))
