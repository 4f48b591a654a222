"""PyTorch built with CUDA on a machine without a GPU, as `pip install torch` gives it: all runs on the CPU."""

import ast
from pathlib import Path

import pytest
import torch

import hotloop

from ..warm import Warm

SOURCE = Path(hotloop.__file__).parent
BUILD = {"torch.version.cuda", "torch.backends.cuda.is_built", "torch.cuda._is_compiled"}
MAY_ASK = {
    "device/probe.py",  # the facts of the machine
    "run/run_files.py",  # a note in the folder of a run
    "kernels/nvrtc.py",  # of a device that is there: CUDA's or ROCm's
    "device/backend.py",  # the same
    "apps/simulate/cuda.py",  # the version that the simulated GPU tells
}
# What this build answers otherwise than one with CUDA. The latter is left as it is.
DRESSED = """
import torch
def no_driver():
    raise RuntimeError("Found no NVIDIA driver on your system.")
if torch.version.cuda is None:
    torch.version.cuda = "13.2"
    torch._C._cuda_getDeviceCount = lambda: 0
    torch._C._cuda_isInBadFork = lambda: False
    torch.cuda._lazy_init = no_driver
    torch.backends.cuda.is_built = lambda: True
"""
TRAINS = """
import torch, hotloop
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(64, 6)
data = TensorDataset(x, x[:, :3].argmax(1))
model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(), nn.Linear(16, 3))
loop = hotloop.Loop(model, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss())
loop.fit(DataLoader(data, 16, shuffle=True), validate=DataLoader(data, 16), save="run", progress=False)
print(hotloop.pick().device, loop.evaluate(DataLoader(data, 16)), sum(p.sum().item() for p in model.parameters()))
with hotloop.simulate("h200"):
    nn.Linear(6, 3).cuda()(torch.randn(2, 6, device="cuda")).sum().backward()
hotloop.measure(lambda: None, repeats=1)
print(torch.cuda.is_available(), torch.cuda.is_initialized())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_it_trains_as_a_build_without_cuda(warm: Warm, tmp_path: Path) -> None:
    printed = []
    for name, source in (("plain", TRAINS), ("dressed", DRESSED + TRAINS)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(source)
        ran = warm.run(folder / "train.py", cwd=folder)
        assert ran.returncode == 0, ran.stderr
        printed.append(ran.stdout)
    assert printed[0].startswith("cpu {")
    assert printed[0] == printed[1]


def test_only_few_files_ask_how_pytorch_was_built() -> None:
    """The build says nothing about a GPU: ask whether a device is there, or what type it has."""
    ask = {
        file.relative_to(SOURCE).as_posix()
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in BUILD
    }
    assert ask == MAY_ASK
