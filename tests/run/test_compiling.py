"""A run that tries a compilation by itself: its random numbers are those of the plain run, and it ends as usual."""

import json
import os
from pathlib import Path

import pytest

from ..warm import Warm

SCRIPT = """
import json, sys, time
import torch
from torch import nn
from torch._inductor import config
from torch.utils.data import DataLoader, TensorDataset
import hotloop

config.fallback_by_default = True  # no C++ compiler, which takes long: its kernels change no random number
torch.set_num_threads(1)
torch.manual_seed(0)
rows = torch.arange(2_000_000.0).unsqueeze(1) / 2e6  # an epoch that would take long, so that a compilation may pay
loader = DataLoader(TensorDataset(rows, rows), 2, shuffle=True)
model = nn.Sequential(nn.Linear(1, 500), nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 1))
loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 1e-3), nn.MSELoss(), device="cpu", plan=sys.argv[1])


def verdict():
    tried = [] if loop.tuning is None else [t for t in loop.tuning.trials if t.lever == "compile"]
    return tried[0].verdict if tried else "not tried"


seen, until, steps = [], time.monotonic() + 240, int(sys.argv[2])
for step, batch in enumerate(loop.batches(loader)):
    if step == steps or (steps < 0 and (verdict() != "not tried" or time.monotonic() > until)):
        break
    loop.step(batch)
    seen.append(batch[0].flatten().tolist())
print(json.dumps({"seen": seen, "rng": torch.get_rng_state().tolist(), "compile": verdict()}))
"""


@pytest.mark.timeout(600)
def test_random_numbers_are_drawn_once_in_a_run_that_compiles(tmp_path: Path, warm: Warm) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment |= {"HOTLOOP_CACHE": str(tmp_path / "auto"), "HOTLOOP_TEST_RANDOM": "1"}  # it leaves as Python does
    tuned = warm.run(script, "auto", "-1", cwd=tmp_path, environment=environment)
    assert tuned.returncode == 0, tuned.stderr  # leaving the program is no abort, either
    auto = json.loads(tuned.stdout.splitlines()[-1])
    assert auto["compile"] != "not tried"
    ran = warm.run(script, "plain", str(len(auto["seen"])), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    plain = json.loads(ran.stdout.splitlines()[-1])
    assert (auto["seen"], auto["rng"]) == (plain["seen"], plain["rng"])
