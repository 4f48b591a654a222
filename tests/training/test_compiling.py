"""A run that tries a compilation by itself: its random numbers are those of the plain run, and it ends as usual."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ..warm import Warm

SCRIPT = """
import json, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import hotloop

torch.set_num_threads(1)
torch.manual_seed(0)
rows = torch.arange(1_000_000.0).unsqueeze(1) / 1e6  # an epoch that would take long, so that a compilation may pay
loader = DataLoader(TensorDataset(rows, rows), 2, shuffle=True)
model = nn.Sequential(nn.Linear(1, 1000), nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1))
loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss(), device="cpu", plan=sys.argv[1])
seen = []
for step, batch in enumerate(loop.batches(loader)):
    if step == 30:
        break
    loop.step(batch)
    seen.append(batch[0].flatten().tolist())
tried = [] if loop.tuning is None else [t.lever for t in loop.tuning.trials if t.verdict != "not tried"]
print(json.dumps({"seen": seen, "rng": torch.get_rng_state().tolist(), "tried": tried}))
"""


@pytest.mark.timeout(600)
def test_random_numbers_are_drawn_once_while_a_compilation_is_tried(tmp_path: Path, warm: Warm) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "HOTLOOP_CACHE": str(tmp_path / "auto"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, str(script), "auto"]  # a process of its own, the way it leaves is looked at, too
    tuned = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    results = []
    for ran in (warm.run(script, "plain", cwd=tmp_path), tuned):
        assert ran.returncode == 0, ran.stderr  # leaving the program is no abort, either
        results.append(json.loads(ran.stdout.splitlines()[-1]))
    plain, auto = results
    assert "compile" in auto["tried"]
    assert (auto["seen"], auto["rng"]) == (plain["seen"], plain["rng"])
