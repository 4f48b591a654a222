"""Another accelerator is one class: `abacus.py` makes one up, and a loop trains on it to the bit."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import hotloop

from ..warm import Warm

TRAINS = """
import json, abacus, hotloop, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hotloop.device.backend import backend_of
from hotloop.memory.usage import usage
from hotloop.values.rng import RngStates, seed

def trained(device, plan):
    seed(0)
    x = torch.randn(64, 6)
    data = TensorDataset(x, x[:, :3].argmax(1))
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss(), device=device, plan=plan)
    options = {"validate": DataLoader(data, 16), "progress": False}
    return loop, loop.fit(DataLoader(data, 16, shuffle=True), epochs=2, **options)

def weights(loop):
    return torch.cat([parameter.detach().cpu().reshape(-1) for parameter in loop.model.parameters()]).tolist()

loop, report = trained(None, "plain")
there = [str(parameter.device) for parameter in loop.model.parameters()]
ones, before = torch.ones(99, device="abacus"), RngStates(loop.device)
first = nn.functional.dropout(ones).tolist()
before.restore()
print(json.dumps({
    "choice": str(hotloop.pick()),
    "asked": str(hotloop.pick("abacus:0")),
    "plan": loop.plan.device,
    "there": there,
    "is_as_on_a_cpu": weights(loop) == weights(trained("cpu", "plain")[0]),
    "is_as_planned": weights(loop) == weights(trained("abacus", "auto")[0]),
    "peak": report.peak_memory,
    "usage": str(usage("abacus")),
    "rngs": sorted(before.state_dict()),
    "is_drawn_again": nn.functional.dropout(ones).tolist() == first,
    "waits": backend_of(loop.device).waits,
}))
"""
SOURCE = Path(hotloop.__file__).parent
# What names CUDA outside of `device/`, and why. A question about a device is a question to its `Backend`.
MAY_NAME_CUDA = {
    "_torch.py",  # the door to private parts
    "data/loader_workers.py",  # only CUDA ends a process that was forked from one that uses it
    "kernels/",  # hotloop's own CUDA kernels
    "memory/fragmentation.py",  # a docstring
    "monitor/processes.py",  # does not import torch
    "placement/waits.py",  # CUDA's debug mode for synchronizations
    "profiling/analysis.py",  # words
    "scripts/training_steps.py",  # CUDA graphs that a person's script captures
    "step/captured_graph.py",  # the CUDA graph itself
    "values/reach.py",  # generators that are looked after
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch takes the GPU for the accelerator of this machine")
def test_a_loop_trains_on_an_accelerator_that_one_class_makes_known(warm: Warm, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("abacus.py"), tmp_path)
    (tmp_path / "train.py").write_text(TRAINS)
    ran = warm.run(tmp_path / "train.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["choice"] == "abacus:0 in fp32: abacus:0 (Abacus One) is an abacus that torch can use."
    assert told["asked"] == "abacus:0 in fp32: You asked for abacus:0: Abacus One."
    assert told["plan"] == "abacus:0"
    assert set(told["there"]) == {"abacus:0"}
    assert told["is_as_on_a_cpu"]
    assert told["is_as_planned"]
    assert told["peak"] > 0
    assert re.fullmatch(r"abacus:0: \S+ KiB allocated, 1024\.0 MiB free of 1\.0 GiB", told["usage"])
    assert told["rngs"] == ["abacus", "numpy", "python", "torch"]
    assert told["is_drawn_again"]
    assert told["waits"] > 0


def test_only_few_files_name_cuda() -> None:
    names = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(r"\btorch\.cuda\b", path.read_text(encoding="utf-8"))
    }
    others = {name for name in names if not name.startswith(("apps/", "device/"))}
    assert {"kernels/" if name.startswith("kernels/") else name for name in others} == MAY_NAME_CUDA


def test_only_few_files_ask_for_the_type_of_a_device() -> None:
    asked = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare)
        and ast.unparse(node.left).endswith((".type", ".is_cuda"))
        and any(kind in ast.unparse(node) for kind in ("'cuda'", "'mps'", "'xpu'", "'cpu'"))
    }
    assert {name for name in asked if not name.startswith(("apps/", "device/", "kernels/"))} == set()
