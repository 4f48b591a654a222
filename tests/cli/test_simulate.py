"""`hotloop simulate` as a person and as a program call it: real processes on a GPU that is not here."""

import json
import re
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
        (("--batch", "0", "train.py"), "--batch"),
        (("--batch", "8", "--batch-from", "colour:red", "train.py"), "colour:red"),
        (("--price", "absent.csv", "train.py"), "absent.csv"),
        (("--price", "prices.csv", "--gpu", "h200", "train.py"), "no price for h200"),
    ],
)
def test_what_cannot_be_meant_is_told(
    args: tuple[str, ...], words: str, script: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(script.parent)
    Path("prices.csv").write_text("t4,0.35\n")
    monkeypatch.setattr(sys, "argv", ["hotloop", "simulate", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capfd.readouterr().err
    assert ended.value.code == 2
    assert words in error
    assert "fix:" in error or "Usage:" in error


LOADER = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.randn(40, 256)), batch_size=8)
    model = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 50000)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x.cuda()).logsumexp(1).mean().backward()
        optimizer.step()
        print("stepped with", len(x))
"""


@pytest.fixture
def loader(tmp_path: Path) -> Path:
    path = tmp_path / "loader.py"
    path.write_text(textwrap.dedent(LOADER).lstrip())
    return path


def test_a_batch_is_set_and_said(loader: Path) -> None:
    done = simulate("--batch", "96", "--gpu", "rtx4090", str(loader))
    assert done.returncode == 0, done.stderr
    assert "stepped with 96" in done.stdout
    assert "the batch is 96, set through the DataLoader of line 5" in done.stdout
    assert "the data has 40 items" in done.stdout
    assert "samples a second" in done.stdout


def test_the_largest_batch_for_a_person(loader: Path) -> None:
    done = simulate("--largest-batch", "--vram", "4GiB", str(loader))
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    found = re.search(r"the largest batch is ([\d,]+): ([\d,]+) does not fit", words)
    assert found is not None, done.stdout
    assert int(found[1].replace(",", "")) < int(found[2].replace(",", ""))
    assert "what fills the memory:" in words
    assert "none of these makes room: " in words  # nearly all of it are weights
    assert "accumulate over 2 batches of 4" in words
    assert done.stdout.count("stepped with") == 2  # the runs of the search are silent
    assert "as it is, a batch of" in done.stderr


def test_cards_with_prices(loader: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("T4,0.35\nRTX 4090,0.7\n")
    done = simulate("--gpu", "t4,rtx4090", "--price", str(prices), "--json", str(loader))
    data = json.loads(done.stdout)
    assert [(row["gpu"], row["dollars_per_hour"]) for row in data["cards"]] == [("t4", 0.35), ("rtx4090", 0.7)]
    for row, one in zip(data["cards"], data["simulations"], strict=True):
        assert (one["batch"]["size"], one["batch"]["samples"], one["largest_batch"]) == (8, 8, None)
        speed, million = row["samples_per_second"], row["dollars_per_million"]
        assert speed["median"] == pytest.approx(8e3 / one["step_ms"]["median"])
        assert million["low"] <= million["median"] <= million["high"]
        assert million["median"] == pytest.approx(1e6 / speed["median"] / 3600 * row["dollars_per_hour"])


def test_a_script_without_a_batch_is_told_how_to_point_at_it(script: Path) -> None:
    script.write_text(script.read_text().replace("--batch", "--rows").replace(".batch", ".rows"))
    done = simulate("--batch", "4", str(script))
    assert done.returncode == 2
    assert "was not found" in done.stderr
    assert "--batch-from" in done.stderr
    done = simulate("--batch", "4", "--batch-from", "argument:--rows", "--json", str(script))
    assert json.loads(done.stdout)["batch"]["source"] == "argument:--rows"
