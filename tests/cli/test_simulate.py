"""`hotloop simulate` as a person and as a program call it: real processes on a GPU that is not here."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hotloop.cli import main

BROKEN = """
    import argparse
    import torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    batch = parser.parse_args().batch
    model = nn.Linear(64, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(100):
        x, y = torch.randn(batch, 64), torch.randint(4, (batch,))
        loss = nn.functional.cross_entropy(model(x.cuda()), y)
        loss.backward()
        optimizer.step()
        print("loss", loss.item())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(BROKEN).lstrip())
    return path


def simulate(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hotloop", "simulate", *args], capture_output=True, text=True, timeout=240, check=False
    )


def test_a_script_with_a_bug_for_a_person(script: Path) -> None:
    done = simulate("--gpu", "rtx4090", str(script), "--batch", "32")
    assert done.returncode == 1, done.stderr
    assert "train.py on NVIDIA GeForce RTX 4090, simulated for 3 steps" in done.stdout
    assert "train.py:12" in done.stdout
    assert "fix:" in done.stdout
    assert "it fits" in done.stdout
    assert "a step takes" in done.stdout
    assert "item, 2 times" in done.stdout
    assert "Traceback" not in done.stderr


def test_json_is_one_object_and_the_script_prints_elsewhere(script: Path) -> None:
    done = simulate("--json", "--steps", "2", "--gpu", "t4", str(script))
    data = json.loads(done.stdout)
    assert (data["gpu"], data["steps"], data["completed"]) == ("t4", 2, 2)
    assert {(finding["level"], finding["line"]) for finding in data["findings"]} == {("error", 12)}
    assert data["peak"]["process"] > data["peak"]["reserved"] >= data["peak"]["allocated"] > 0
    assert data["fits"] is True
    assert data["step_ms"]["low"] <= data["step_ms"]["median"] <= data["step_ms"]["high"]
    assert [(sync["line"], sync["kind"], sync["count"]) for sync in data["syncs"]] == [(15, "item", 1)]
    assert "loss" in done.stderr


def test_several_cards_are_compared(script: Path) -> None:
    done = simulate("--gpu", "t4,h200", "--json", str(script))
    assert [one["gpu"] for one in json.loads(done.stdout)["simulations"]] == ["t4", "h200"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--gpu", "rtx4091", "train.py"), "rtx4090"),
        (("--gpu", ",", "train.py"), "--gpu is empty"),
        (("--vram", "much", "train.py"), "much"),
        (("--time-limit", "0", "train.py"), "--time-limit"),
        (("nowhere.py",), "nowhere.py"),
    ],
)
def test_what_cannot_be_meant_is_told(
    args: tuple[str, ...], words: str, script: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    monkeypatch.setattr(sys, "argv", ["hotloop", "simulate", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capfd.readouterr().err
    assert ended.value.code == 2
    assert words in error
    assert "fix:" in error
