"""The largest batch of a script: what is said was simulated, and holds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotloop.apps.simulate.batch_setting import BatchSetting
from hotloop.apps.simulate.cards import Card, card
from hotloop.apps.simulate.simulation_record import Simulation
from hotloop.apps.simulate.study import Study

SMALL, LARGE = (
    replace(card("rtx4090"), key=key, memory=size << 20) for key, size in (("small", 1536), ("large", 2048))
)
# Few kinds of operations and shapes: each search runs it many times.
SCRIPT = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, x):
        x = self.layer(x)
        for _ in range(8):
            x = x.sin()
        return x


class Net(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


batch = 512
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(18):
    x = torch.empty(batch, 1024).cuda()
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
"""
BATCH = BatchSetting("variable", "batch", 512)


def write(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def fits(simulator: Any, path: Path, on: Card, batch: int) -> bool:
    """Whether a batch fits, by really running it."""
    ran = simulator.run(path, [], on, steps=2, timed=False, batch=replace(BATCH, size=batch))
    assert ran.error is None or any(finding.code == "out-of-memory" for finding in ran.findings)
    return bool(ran.fits is not False)


@pytest.fixture(scope="module")
def studied(simulator, tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path, Simulation, list[str]]:
    """A script whose largest batch was found."""
    path, heard = write(tmp_path_factory.mktemp("study"), SCRIPT), []
    study = Study(simulator, path, [], batch=BATCH, told=heard.append)
    return study, path, study.with_largest(study.plain(SMALL), SMALL), heard


def test_the_largest_batch_fits_and_one_percent_more_does_not(studied, simulator) -> None:
    _, path, found, heard = studied
    assert found.search.batch == found.largest_batch
    assert found.largest_batch < found.search.too_large <= 1.01 * found.largest_batch + 1
    assert fits(simulator, path, SMALL, found.largest_batch)
    assert not fits(simulator, path, SMALL, found.search.too_large)
    assert found.search.runs <= 12
    assert len(heard) == found.search.runs - 1  # the first was known
    assert "train.py:" in found.search.limited_by
    assert "activations (" in found.search.limited_by
    assert Simulation.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_second_card_has_its_own(studied, simulator) -> None:
    study, path, found, _ = studied
    more = study.with_largest(study.plain(LARGE, silent=True), LARGE)
    assert more.largest_batch > found.largest_batch
    assert fits(simulator, path, LARGE, more.largest_batch)
    assert not fits(simulator, path, LARGE, more.search.too_large)


def test_not_even_one(simulator, tmp_path: Path) -> None:
    path = write(
        tmp_path,
        SCRIPT.replace("batch = 512", "batch = 4")
        .replace("width=1024", "width=8192")
        .replace("(batch, 1024)", "(batch, 8192)"),
    )
    study = Study(simulator, path, [], batch=replace(BATCH, size=4))
    found = study.with_largest(study.plain(SMALL), SMALL)
    assert (found.largest_batch, found.search.too_large, found.search.exact) == (None, 1, True)


def test_data_that_does_not_grow_ends_the_search(simulator, tmp_path: Path) -> None:
    text = SCRIPT.replace("torch.empty(batch, 1024)", "torch.empty(40, 1024)[:batch]")
    path = write(tmp_path, text.replace("= 512", "= 4"))
    study = Study(simulator, path, [], batch=replace(BATCH, size=4))
    found = study.with_largest(study.plain(SMALL), SMALL)
    assert found.search.too_large is None
    assert 36 <= found.largest_batch <= 44
    assert any("never has more than about" in note for note in found.notes)


def test_the_search_begins_with_the_samples_of_data_that_has_less_than_a_batch(simulator, tmp_path: Path) -> None:
    loader = "torch.utils.data.DataLoader(torch.empty(40, 1024), batch)"
    path = write(tmp_path, SCRIPT.replace("x = torch.empty(batch, 1024).cuda()", f"x = next(iter({loader})).cuda()"))
    study = Study(simulator, path, [], batch=BATCH)
    found = study.with_largest(study.plain(SMALL), SMALL)
    assert found.largest_batch == 40
    assert any("never has more than about 40 items" in note for note in found.notes)


def test_a_script_that_fails_with_another_batch_ends_the_search(simulator, tmp_path: Path) -> None:
    path = write(tmp_path, SCRIPT.replace("    loss =", "    assert len(x) < 600, 'too many'\n    loss ="))
    study = Study(simulator, path, [], batch=BATCH)
    found = study.with_largest(study.plain(SMALL), SMALL)
    assert found.largest_batch == 512
    assert any("AssertionError: too many" in note for note in found.notes)
