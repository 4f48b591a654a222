"""A run that tries a compilation by itself: its random numbers are those of the plain run, and it ends as usual."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import hotloop

torch.set_num_threads(1)
torch.manual_seed(0)
rows = torch.arange(4_000_000.0).unsqueeze(1) / 4e6  # an epoch that would take hours, so that a compilation may pay
loader = DataLoader(TensorDataset(rows, rows), 2, shuffle=True)
model = nn.Sequential(nn.Linear(1, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
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
def test_random_numbers_are_drawn_once_while_a_compilation_is_tried(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    results = []
    for plan in ("plain", "auto"):
        # Compiled in its own process: others, to which PyTorch may hand it, take longer to start.
        environment = {**os.environ, "HOTLOOP_CACHE": str(tmp_path / plan), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        ran = subprocess.run(
            [sys.executable, str(script), plan], capture_output=True, text=True, check=False, env=environment
        )
        assert ran.returncode == 0, ran.stderr  # leaving the program is no abort, either
        results.append(json.loads(ran.stdout.splitlines()[-1]))
    plain, auto = results
    assert "compile" in auto["tried"]
    assert (auto["seen"], auto["rng"]) == (plain["seen"], plain["rng"])
