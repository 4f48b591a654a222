"""On several ranks there are no CUDA graphs: a plan that has one is refused in words, a file of one goes on without."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hotloop.files.whole import write_json
from hotloop.levers import LEVERS
from hotloop.levers.base import LeverTarget
from hotloop.levers.cuda_graph import GraphLever
from hotloop.plan import Plan

from .conftest import Launcher

HERE = Path(__file__).parent


def test_a_plan_with_a_graph_is_refused_in_words_and_a_file_of_one_goes_on_without(
    launch: Launcher, tmp_path: Path
) -> None:
    found = Plan("cuda", graph=16, fused=True, levers=("row kernels",))  # in one process
    write_json(tmp_path / "plan.json", found.to_json())
    for rank in launch(HERE / "uncaptured.py", str(tmp_path)).wait():
        assert rank.code == 0, rank.err
        told = json.loads(rank.out.splitlines()[-1])
        for graph in (1, 16):
            assert "the plan has graph: several ranks exchange gradients in each step" in told[f"graph={graph}"]
            assert "leave it out of the plan" in told[f"graph={graph}"]
        assert any("plan.json has graph, which is left out here: several ranks" in words for words in told["said"])
        assert (told["left"]["graph"], told["left"]["fused"], told["left"]["levers"]) == (0, True, [])


def test_the_lever_is_possible_for_one_process_alone() -> None:
    model = nn.Linear(2, 1)
    target = LeverTarget(torch.device("cuda"), model, [torch.optim.SGD(model.parameters(), 0.1)])
    (lever,) = (each for each in LEVERS if isinstance(each, GraphLever))
    assert lever.impossible(target, Plan("cuda")) is None
    assert "several ranks" in str(lever.impossible(replace(target, on_ranks=True), Plan("cuda")))
