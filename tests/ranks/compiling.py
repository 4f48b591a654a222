"""A training that is compiled, beside the same one run eagerly: `compiling.py`, which prints how far apart they end.

Dynamo and AOTAutograd trace as ever; their graphs run without Inductor, whose kernels other tests compile.
"""

from typing import Any

import torch
from scenes import RANK, blocks, loader, rows, trained
from torch import nn
from torch._dynamo.utils import counters

import hotloop
from hotloop.levers import compile as lever
from hotloop.step import compilation


class AotEager:
    graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


backend = AotEager()
compilation.inductor = lever.inductor = lambda *_: backend
weights = {}
for mode in ("off", "default", "blocks"):
    torch.manual_seed(10 * RANK)
    data = loader(rows(items=96), drop_last=True)
    loop, _ = trained(blocks(), nn.CrossEntropyLoss(), data, epochs=2, plan=hotloop.Plan("cpu", compile=mode))
    assert (mode != "off") == (counters["stats"]["unique_graphs"] > 0)
    assert loop.plan.compile == mode
    counters.clear()
    weights[mode] = loop.state_dict()["model"]
for mode in ("default", "blocks"):
    print(mode, max(float((weights[mode][name] - value).abs().max()) for name, value in weights["off"].items()))
