"""The zoo as commands: scripts that a person would run, with the default plan, twice where something is remembered."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..warm import Warm

SCRIPT = """
import json, signal, sys
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
import hotloop

torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

    def forward(self, x):
        {forward}


def objective(model, batch):
    {objective}


class Rows(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] * 0.1 + 3, self.x[index, :3].argmax()


def rate(updates):
    if updates == 244:
        signal.raise_signal(signal.SIGINT)  # Ctrl-C
    return 1.0


def losses_of(plan):
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    rows = {rows}
    loader = DataLoader(rows, 8, shuffle=True, generator=torch.Generator().manual_seed(1))
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    loop = hotloop.Loop(model, optimizer, objective=objective, scheduler=scheduler, plan=plan, device="cpu")
    report = loop.fit(loader, epochs=3000)
    return [epoch.loss for epoch in report.epochs if epoch.items == 64]


if __name__ == "__main__":
    found = {{plan: losses_of(plan) for plan in ("auto", "plain")}}
    open(sys.argv[1], "w").write(json.dumps(found))
"""
PAIRS = "TensorDataset(x, x[:, :3].argmax(1))"
DICTS = '[{"x": a, "labels": a[:3].argmax()} for a in x]'
CLASSIFY = "return F.cross_entropy(model(batch[0]), batch[1])"
POP = 'labels = batch.pop("labels"); return F.cross_entropy(model(batch["x"]), labels)'
EPOCHS = 30  # of eight steps, before Ctrl-C; a plan is adopted before the seventh step and then timed


def script(folder: Path, forward: str, objective: str = CLASSIFY, rows: str = PAIRS) -> Path:
    file = folder / "train.py"
    file.write_text(SCRIPT.format(forward=forward, objective=objective, rows=rows))
    return file


Run = Callable[[Path], tuple[str, dict[str, list[float]]]]


@pytest.fixture
def run(warm: Warm) -> Run:
    """What the command printed, and the losses of its epochs by plan."""

    def call(file: Path) -> tuple[str, dict[str, list[float]]]:
        result = file.with_name("losses.json")
        environment = {**os.environ, "HOTLOOP_CACHE": str(file.parent / "cache")}
        ran = warm.run(file, str(result), cwd=file.parent, environment=environment)
        assert ran.returncode == 0, ran.stderr[-3000:]
        found: dict[str, Any] = json.loads(result.read_text())
        return ran.stdout + ran.stderr, found

    return call


def assert_same_losses(found: dict[str, list[float]]) -> None:
    assert len(found["auto"]) == len(found["plain"]) == EPOCHS
    assert all(map(math.isfinite, found["auto"]))
    assert found["auto"][:12] == pytest.approx(found["plain"][:12], rel=0.02)  # levers round, within the gate


def test_an_edited_forward_does_not_get_the_plan_of_the_one_before(tmp_path: Path, run: Run) -> None:
    file = script(tmp_path, "return self.layers(x)")
    said, found = run(file)
    assert_same_losses(found)
    assert "for fp32 eager" in said, "the run was to be long enough to be tuned"
    script(tmp_path, "return 2 * self.layers(0.5 * x)")
    said, found = run(file)
    assert_same_losses(found)


def test_a_forward_that_normalises_its_input_in_place(tmp_path: Path, run: Run) -> None:
    _, found = run(script(tmp_path, "x.sub_(3.0).div_(0.1); return self.layers(x)", rows="Rows(x)"))
    assert_same_losses(found)


def test_an_objective_that_pops_its_labels(tmp_path: Path, run: Run) -> None:
    _, found = run(script(tmp_path, "return self.layers(x)", POP, DICTS))
    assert_same_losses(found)
