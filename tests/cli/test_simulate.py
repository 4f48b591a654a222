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
    assert "item  2 times" in done.stdout
    assert "Traceback" not in done.stderr + done.complained


def test_json_has_the_findings_the_memory_and_the_time(script: Path, simulate) -> None:
    data = json.loads(simulate("--json", "--steps", "2", "--gpu", "t4", str(script)).stdout)
    assert (data["gpu"], data["steps"], data["completed"]) == ("t4", 2, 2)
    assert {(finding["level"], finding["line"]) for finding in data["findings"]} == {("error", 12)}
    assert data["peak"]["process"] > data["peak"]["reserved"] >= data["peak"]["allocated"] > 0
    assert data["fits"] is True
    assert data["step_ms"]["low"] <= data["step_ms"]["median"] <= data["step_ms"]["high"]
    assert [(sync["line"], sync["kind"], sync["count"]) for sync in data["syncs"]] == [(15, "item", 1)]


def begun(verb: str, folder: Path, script: str, *options: str, **settings: Any) -> subprocess.Popen[str]:
    """`hotloop` as a person starts it, in a folder with files that are called like modules which it needs."""
    for name in ("here", "project", "library"):
        (folder / name).mkdir()
    for name in ("resource", "torch", "beside"):
        (folder / "here" / f"{name}.py").write_text("raise SystemExit('a file of the current folder was run')\n")
    (folder / "project" / "beside.py").write_text("")
    (folder / "library" / "shared.py").write_text("")
    looks = "import sys, beside, shared, resource\nprint(*sys.path, sep='\\n')\n"
    (folder / "project" / "train.py").write_text(looks + script)
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("hotloop")), verb, *options, str(folder / "project" / "train.py")],
        cwd=folder / "here",
        env={**os.environ, "PYTHONPATH": str(folder / "library"), "TMPDIR": str(folder)},
        text=True,
        **settings,
    )


def looked_for_as_python_does(folder: Path, shown: list[str]) -> bool:
    """Whether modules are looked for beside the script first, and never in the current folder."""
    ours = shown[: shown.index(next(each for each in shown if each.endswith(".zip")))]
    first = [str(folder / "project"), str(folder / "library")]
    return ours[:2] == first and "" not in ours and str(folder / "here") not in shown


SLOW = """
import subprocess, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("started", flush=True)
time.sleep(600)
"""
ENDINGS = [("SIGINT", 130, ["hotloop: stopped"]), ("SIGTERM", 143, [])]


@pytest.mark.parametrize(("how", "code", "words"), some(ENDINGS, ENDINGS[:1]))  # `test_children.py` has all signals
def test_the_script_prints_elsewhere_than_json_and_ends_with_all_it_started(
    how: str, code: int, words: list[str], tmp_path: Path
) -> None:
    err = tmp_path / "err"
    with (
        err.open("w") as errors,
        begun("simulate", tmp_path, SLOW, "--json", stdout=subprocess.PIPE, stderr=errors) as running,
    ):
        end = time.monotonic() + 240
        while not err.read_text().endswith("started\n"):
            assert time.monotonic() < end, err.read_text()
            time.sleep(0.05)
        family = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(getattr(signal, how))
        assert running.communicate() == ("", None)
    assert running.returncode == code
    shown = err.read_text().splitlines()
    assert shown[shown.index("started") + 1 :] == words
    assert looked_for_as_python_does(tmp_path, shown)
    assert len(family) == 3  # the simulated GPU, the script, and what the script started
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert list(tmp_path.glob("hotloop*")) == []


@pytest.mark.skipif(not THOROUGH, reason="the same code as that of the test before, and seconds; HOTLOOP_TEST_RANDOM=1")
def test_a_profile_looks_for_modules_as_python_does(tmp_path: Path) -> None:
    with begun("profile", tmp_path, "", stdout=subprocess.PIPE) as running:
        assert looked_for_as_python_does(tmp_path, running.communicate()[0].splitlines())


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
    ],
)
def test_what_cannot_be_meant_is_told(
    args: tuple[str, ...], words: str, script: Path, monkeypatch: pytest.MonkeyPatch, simulate
) -> None:
    monkeypatch.chdir(script.parent)
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
        model(x.cuda()).mean().backward()
        optimizer.step()
"""


def test_cards_have_one_host_and_no_rank_that_nobody_can_tell_and_slow_data_is_noted(tmp_path: Path, simulate) -> None:
    path = tmp_path / "slow.py"
    path.write_text(textwrap.dedent(SLOW_DATA))
    done = simulate("--gpu", "t4,h200", "--json", str(path))
    data = json.loads(done.stdout)
    t4, h200 = data["simulations"]
    assert (t4["gpu"], h200["gpu"]) == ("t4", "h200")
    assert h200["step_ms"]["median"] == pytest.approx(t4["step_ms"]["median"], rel=0.1)
    for one in (t4, h200):
        assert one["limited_by"] == "launches"
        for words in ("the GPU waits for data: batches take", "Intel Xeon"):
            assert any(words in note for note in one["notes"])
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
    found = re.search(r"largest batch ([\d,]+) ([\d,]+) does not fit", words)
    assert found is not None, done.stdout
    assert int(found[1].replace(",", "")) < int(found[2].replace(",", ""))
    assert "what fills the memory:" in words
    assert done.printed.count("stepped with") == 2  # the runs of the search are silent
    assert "a batch of" in done.stderr
