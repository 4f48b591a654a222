"""`hotloop simulate` as a person and as a program call it: on a GPU that is not here.

Most tests call it in this process, with the one in which all scripts are simulated; some start it as a person does.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from hotloop.apps.simulate.largest_batch import largest
from hotloop.cli import main

from ..simulate.conftest import built, output_of, simulator  # noqa: F401  # the fixtures of those tests
from ..thorough import THOROUGH, some
from ..warm import HOTLOOP, Warm

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


class Said(NamedTuple):
    """What `hotloop simulate` and the script said."""

    returncode: int
    stdout: str
    stderr: str
    printed: str  # by the script
    complained: str


@pytest.fixture
def simulate(
    simulator: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Said]:
    """`hotloop simulate` in this process."""
    monkeypatch.setattr("hotloop.apps.simulate.running.Simulator", lambda **_: nullcontext(simulator))

    def call(*args: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["hotloop", "simulate", *args])
        with output_of(simulator) as printed, pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return Said(int(ended.value.code or 0), said.out, said.err, *printed)

    return call


def test_a_script_with_a_bug_for_a_person(script: Path, simulate) -> None:
    done = simulate("--gpu", "rtx4090", str(script), "--batch", "32")
    assert done.returncode == 1, done.stderr
    assert "train.py on NVIDIA GeForce RTX 4090, simulated for 3 steps" in done.stdout
    assert "train.py:12" in done.stdout
    assert "fix:" in done.stdout
    assert "it fits" in done.stdout
    assert "a step takes" in done.stdout
    assert "item, 2 times" in done.stdout
    assert "Traceback" not in done.stderr + done.complained


def started(verb: str, folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """`hotloop` as a person starts it, in a folder with files that are called like modules which it needs."""
    for name in ("here", "project", "library"):
        (folder / name).mkdir()
    for name in ("resource", "torch", "beside"):
        (folder / "here" / f"{name}.py").write_text("raise SystemExit('a file of the current folder was run')\n")
    (folder / "project" / "beside.py").write_text("")
    (folder / "library" / "shared.py").write_text("")
    looks = "import sys, beside, shared, resource\nprint(*sys.path, sep='\\n')\n"
    (folder / "project" / "train.py").write_text(looks + script)
    return subprocess.run(
        [str(Path(sys.executable).with_name("hotloop")), verb, *options, str(folder / "project" / "train.py")],
        cwd=folder / "here",
        env={**os.environ, "PYTHONPATH": str(folder / "library")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def looked_for_as_python_does(folder: Path, shown: list[str]) -> bool:
    """Whether modules are looked for beside the script first, and never in the current folder."""
    ours = shown[: shown.index(next(each for each in shown if each.endswith(".zip")))]
    first = [str(folder / "project"), str(folder / "library")]
    return ours[:2] == first and "" not in ours and str(folder / "here") not in shown


def test_json_is_one_object_and_the_script_prints_elsewhere(tmp_path: Path) -> None:
    done = started("simulate", tmp_path, textwrap.dedent(BROKEN).lstrip(), "--json", "--steps", "2", "--gpu", "t4")
    data = json.loads(done.stdout)
    assert (data["gpu"], data["steps"], data["completed"]) == ("t4", 2, 2)
    assert {(finding["level"], finding["line"]) for finding in data["findings"]} == {("error", 14)}
    assert data["peak"]["process"] > data["peak"]["reserved"] >= data["peak"]["allocated"] > 0
    assert data["fits"] is True
    assert data["step_ms"]["low"] <= data["step_ms"]["median"] <= data["step_ms"]["high"]
    assert [(sync["line"], sync["kind"], sync["count"]) for sync in data["syncs"]] == [(17, "item", 1)]
    *shown, loss = done.stderr.splitlines()
    assert loss.startswith("loss ")
    assert looked_for_as_python_does(tmp_path, shown), done.stderr


@pytest.mark.skipif(not THOROUGH, reason="the same code as that of the test before, and seconds; HOTLOOP_TEST_RANDOM=1")
def test_a_profile_looks_for_modules_as_python_does(tmp_path: Path) -> None:
    done = started("profile", tmp_path, "")
    assert looked_for_as_python_does(tmp_path, done.stdout.splitlines()), done.stderr


def test_several_cards_are_compared(script: Path, simulate) -> None:
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
        (("--batch", "8", "train.py"), "say how large it is and where the script takes it"),
        (("--batch-from", "argument:--batch", "train.py"), "say how large it is and where"),
        (("--largest-batch", "train.py"), "--batch 8 --batch-from argument:--batch-size"),
        (("--batch", "999999999999", "--batch-from", "argument:--batch", "train.py"), "does not fit on NVIDIA H200"),
        (("--batch", "8", "--batch-from", "colour:red", "train.py"), "colour:red"),
        (("--price", "absent.csv", "train.py"), "absent.csv"),
        (("--price", "prices.csv", "--gpu", "h200", "train.py"), "no price for h200"),
    ],
)
def test_what_cannot_be_meant_is_told(
    args: tuple[str, ...], words: str, script: Path, monkeypatch: pytest.MonkeyPatch, simulate
) -> None:
    monkeypatch.chdir(script.parent)
    Path("prices.csv").write_text("t4,0.35\n")
    told = simulate(*args)
    assert told.returncode == 2
    assert words in told.stderr
    assert "fix:" in told.stderr or "Usage:" in told.stderr


def test_a_script_that_fails_gets_no_verdict(script: Path, simulate) -> None:
    text = script.read_text()
    script.write_text(f"{text}    raise ValueError('such is life')\n")
    line = len(text.splitlines()) + 1
    told = simulate(str(script))
    assert told.returncode == 1
    assert "no verdict: the script failed" in told.stdout
    assert f"train.py:{line}" in told.stdout
    for words in ("it fits", "no device bug", "a step takes"):
        assert words not in told.stdout
    shown = told.complained.strip().splitlines()
    assert (shown[0], shown[-1]) == ("Traceback (most recent call last):", "ValueError: such is life")
    assert f'File "{script}", line {line}' in told.complained
    script.write_text(f"{text}    raise SystemExit(5)\n")
    told = simulate("--json", str(script))
    found = json.loads(told.stdout)
    assert (told.returncode, found["status"], found["completed"]) == (1, "failed", 1)
    assert (found["fits"], found["peak"], found["step_ms"]) == (None, None, None)


SLOW = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("started", flush=True)
time.sleep(600)
"""


ENDINGS = [("SIGINT", 130, "hotloop: stopped\n"), ("SIGTERM", 143, "")]


@pytest.mark.parametrize(("how", "code", "words"), some(ENDINGS, ENDINGS[:1]))  # `test_children.py` has all signals
def test_it_ends_with_all_it_started(how: str, code: int, words: str, tmp_path: Path, warm: Warm) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    scratch, out, err = (tmp_path / name for name in ("scratch", "out", "err"))
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    running = warm.start(
        *HOTLOOP, "simulate", tmp_path / "slow.py", cwd=tmp_path, environment=environment, out=out, err=err
    )
    end = time.monotonic() + 120
    while out.read_text() != "started\n":
        assert time.monotonic() < end, err.read_text()
        time.sleep(0.05)
    family = psutil.Process(running.pid).children(recursive=True)
    os.kill(running.pid, getattr(signal, how))
    assert running.wait() == code
    assert err.read_text() == words
    assert len(family) == 3  # the simulated GPU, the script, and what the script started
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert list(scratch.glob("hotloop*")) == []


LOADER = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.randn(8192, 256)), batch_size=8)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 50000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in loader:
        optimizer.zero_grad()
        model(x.cuda()).logsumexp(1).mean().backward()
        optimizer.step()
        print("stepped with", len(x))
"""


SLOW_DATA = """
    import time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            time.sleep(0.01)
            return torch.randn(256)

    model = nn.Linear(256, 16).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(Slow(), batch_size=8):
        time.sleep(0.02)
        model(x.cuda()).mean().backward()
        optimizer.step()
"""


def test_cards_have_one_host_and_the_same_data_and_no_rank_that_nobody_can_tell(tmp_path: Path, simulate) -> None:
    path = tmp_path / "slow.py"
    path.write_text(textwrap.dedent(SLOW_DATA))
    done = simulate("--gpu", "t4,h200", "--json", str(path))
    data = json.loads(done.stdout)
    t4, h200 = data["simulations"]
    assert h200["step_ms"]["median"] == pytest.approx(t4["step_ms"]["median"], rel=0.1)
    for one in (t4, h200):
        assert one["pace"]["limited_by"] == "data"
        assert one["pace"]["data_ms"] == pytest.approx(t4["pace"]["data_ms"])
        assert one["pace"]["data_ms"] > 80
        assert one["pace"]["work_ms"] > 5  # 20, but for steps in which others had this core
        assert one["pace"]["step_ms"]["median"] > 85 > one["step_ms"]["median"]
        assert any("Intel Xeon" in note for note in one["notes"])
    assert (t4["step_ms"]["calibrated"], h200["step_ms"]["calibrated"]) == (False, True)
    assert sorted(data["ranking"][0]) == ["h200", "t4"]


@pytest.fixture
def loader(tmp_path: Path) -> Path:
    path = tmp_path / "loader.py"
    path.write_text(textwrap.dedent(LOADER).lstrip())
    return path


def test_a_batch_is_set(script: Path, simulate) -> None:
    done = simulate("--batch", "4", "--batch-from", "argument:--batch", "--json", str(script))
    batch = json.loads(done.stdout)["batch"]
    assert (batch["size"], batch["source"], batch["samples"]) == (4, "argument:--batch", 4)


def test_the_largest_batch_for_a_person(loader: Path, simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hotloop.apps.simulate.study.largest", partial(largest, within=0.3)
    )  # `test_study.py` looks closely
    done = simulate(
        "--largest-batch", "--batch", "8", "--batch-from", "variable:batch_size", "--vram", "4GiB", str(loader)
    )
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    found = re.search(r"the largest batch is ([\d,]+): ([\d,]+) does not fit", words)
    assert found is not None, done.stdout
    assert int(found[1].replace(",", "")) < int(found[2].replace(",", ""))
    assert "what fills the memory:" in words
    assert "none of these takes less memory: " in words  # nearly all of it are weights
    assert "accumulate over 2 batches of 4" in words
    assert done.printed.count("stepped with") == 2  # the runs of the search are silent
    assert "as it is, a batch of" in done.stderr


def test_cards_with_prices(loader: Path, tmp_path: Path, simulate) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("T4,0.35\nRTX 4090,0.7\n")
    done = simulate("--gpu", "t4,rtx4090", "--price", str(prices), "--json", str(loader))
    data = json.loads(done.stdout)
    assert [(row["gpu"], row["dollars_per_hour"]) for row in data["cards"]] == [("t4", 0.35), ("rtx4090", 0.7)]
    for row, one in zip(data["cards"], data["simulations"], strict=True):
        assert (one["batch"]["samples"], one["largest_batch"]) == (8, None)
        speed, million = row["samples_per_second"], row["dollars_per_million"]
        assert speed["median"] == pytest.approx(8e3 / one["pace"]["step_ms"]["median"])
        assert million["low"] <= million["median"] <= million["high"]
        assert million["median"] == pytest.approx(1e6 / speed["median"] / 3600 * row["dollars_per_hour"])


def test_several_gpus_are_modelled_from_one(script: Path, simulate) -> None:
    script.write_text(script.read_text().replace("(model(x.cuda()), y)", "(model(x.cuda()), y.cuda())"))
    done = simulate("--gpus", "64", "--parallel", "fsdp", "--link", "nvlink4,ethernet100", str(script))
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert "64 GPUs with FSDP over NVLink 4 in nodes of 8, Ethernet 100: modelled, not measured" in told
    assert "each rank would take" in told
    assert "efficiency" in told


def test_several_gpus_as_json_and_for_each_card(script: Path, simulate) -> None:
    done = simulate("--gpu", "h200,rtx4090", "--gpus", "8", "--parallel", "ddp", "--json", str(script))
    first, second = json.loads(done.stdout)["ranks"]
    assert (first["parallel"], first["gpus"], first["basis"]) == ("ddp", 8, "modelled")
    assert (first["cluster"]["inside"]["key"], second["cluster"]["inside"]["key"]) == ("nvlink4", "pcie4")
    assert first["step"]["efficiency"] <= 1
    assert first["process"] > first["memory"]["parameters"]


def test_what_runs_out_on_one_gpu_is_told_of_several(tmp_path: Path, simulate) -> None:
    path = tmp_path / "large.py"
    path.write_text(
        textwrap.dedent("""
        import torch
        from torch import nn

        blocks = [nn.Sequential(nn.Linear(8192, 8192, device="cuda"), nn.ReLU()) for _ in range(3)]
        net = nn.Sequential(*blocks)
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(4):
            net(torch.randn(8, 8192, device="cuda")).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """)
    )
    done = simulate("--vram", "3GiB", "--gpus", "8", "--parallel", "fsdp", str(path))
    assert done.returncode == 1
    assert "it does not fit: the process" in done.stdout
    assert "it fits: each rank would take" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "64"], "a machine has at most 16"),
        (["--link", "nvlink4"], "--link without --parallel"),
        (["--gpus", "8", "--parallel", "pipeline"], "choose one of: ddp, fsdp"),
        (["--gpus", "8", "--parallel", "ddp", "--link", "string"], "no link is known as 'string'"),
        (["--gpus", "100000", "--parallel", "ddp"], "at most 65,536"),
    ],
)
def test_several_gpus_that_cannot_be_meant(options: list[str], words: str, script: Path, simulate) -> None:
    done = simulate(*options, str(script))
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
