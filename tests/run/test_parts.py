"""A run is a kernel and its parts: each part's file can be deleted, and parts know nothing of one another."""

import shutil
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.metrics import accuracy
from hotloop.run import parts
from hotloop.run.part import Part, in_order

from ..thorough import THOROUGH
from ..warm import Warm

ROOT = Path(hotloop.__file__).parents[2]
FOLDER = Path(parts.__file__).parent
ALL = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "data", "epoch_losses"))
TODAY = date.today().toordinal() % len(ALL)
# Two at once in the normal run, others each day; in the thorough one each by itself.
DELETED = [(name,) for name in ALL] if THOROUGH else [(ALL[TODAY], ALL[TODAY - len(ALL) // 2])]
# In a process that has torch, and has hotloop from where it is whole: forget that, and be what the other words say.
WITHOUT = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "hotloop"]:
    del sys.modules[name]
sys.argv = sys.argv[1:]
(runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module)(sys.argv[0], run_name="__main__")
"""
RUN = """
import sys, torch, hotloop
from torch import nn
from hotloop.metrics import accuracy

x, y = torch.randn(24, 4), torch.randint(0, 3, (24,))
data = [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])]
folder, *refused = sys.argv[1:]

def fit(argument=None):
    values = {"validate": data, "save": folder, "on_step": print, "log": folder + ".jsonl", "time_limit": 60}
    given = {argument: values[argument]} if argument in values else {}
    if argument == "patience":
        given = {"validate": data, "patience": 2}
    more = {"train_metrics": {"accuracy": accuracy}} if argument == "train_metrics" else {}
    model = nn.Linear(4, 3)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), device="cpu", **more)
    report = loop.fit(data, epochs=2, progress=False, **given)
    return loop.steps, len(report.epochs)

for argument in refused:
    try:
        print("NOT REFUSED", fit(argument))
    except hotloop.HotloopError as error:
        print(error)
print(hotloop.__file__, *fit())
"""

RESUMED = """
import sys, torch, hotloop
from torch import nn
from hotloop.checkpoint.store import Store

data = [(torch.randn(8, 4), torch.randint(0, 3, (8,)))] * 3
for epochs in (2, 4):
    model = nn.Linear(4, 3)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss(), device=sys.argv[2])
    loop.fit(data, epochs=epochs, save=sys.argv[1], resume=True)
    norms = Store(sys.argv[1]).load_latest().tree["weight_norms"]["norms"]
    print(len(norms), len(set(norms)))
"""


@pytest.mark.parametrize("names", DELETED, ids="-".join)
def test_without_the_file_of_a_part_the_rest_works(names: tuple[str, ...], tmp_path: Path, warm: Warm) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "apps"))
    for name in names:
        (tmp_path / "src/hotloop/run/parts" / f"{name}.py").unlink()
    for script, text in {"without.py": WITHOUT, "run.py": RUN}.items():
        (tmp_path / "src" / script).write_text(text)

    def python(*args: str) -> str:
        done = warm.run(tmp_path / "src/without.py", *args, cwd=ROOT)
        return done.stdout + done.stderr

    refused = {parts.SERVES[name][0]: name for name in names if name in parts.SERVES}
    told = python(str(tmp_path / "src/run.py"), str(tmp_path / "run"), *refused)
    assert "NOT REFUSED" not in told
    for argument, name in refused.items():
        assert f"{argument}= is done by hotloop/run/parts/{name}.py" in told
    assert told.count("fix:") == len(refused)
    assert told.split()[-3:] == [str(tmp_path / "src/hotloop/__init__.py"), "6", "2"]
    assert not list(tmp_path.glob("run*")), "nothing is left half done"
    trainings = "plain_plan and (plain_mlp or gan or cnn_with_batchnorm)"
    told = python("pytest", "-q", "-p", "no:cacheprovider", "tests/zoo/test_same_training.py", "-k", trainings)
    assert " passed" in told, told
    assert "failed" not in told


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_part_of_the_guide_is_one_file_and_resumes(device: str, tmp_path: Path, warm: Warm) -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Add a part of a run")[2]
    code = guide.partition("```python\n")[2].partition("```")[0]
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "apps"))
    (tmp_path / "src/hotloop/run/parts/weight_norms.py").write_text(code)
    (tmp_path / "src/without.py").write_text(WITHOUT)
    (tmp_path / "src/run.py").write_text(RESUMED)
    script = str(tmp_path / "src/run.py")
    done = warm.run(tmp_path / "src/without.py", script, str(tmp_path / "run"), device, cwd=ROOT)
    assert done.stdout.splitlines() == ["2 2", "4 4"], done.stderr
    assert done.stderr.count("norm of the weights") == 4


def test_parts_that_declare_no_order_train_the_same_in_any(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, report, and what the hooks hear; also of a run that goes on from the checkpoint of another order."""
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    names = list(parts._names())
    draw = torch.Generator().manual_seed(TODAY)

    def trained(folder: Path, *, shuffled: bool) -> tuple[Any, ...]:
        for epochs in (2, 4):
            if shuffled:
                names[:] = [names[i] for i in torch.randperm(len(names), generator=draw)]
            monkeypatch.setattr(parts, "_names", lambda: tuple(names))
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
            optimizer = torch.optim.Adam(model.parameters())
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            loss, more = nn.CrossEntropyLoss(), {"accuracy": accuracy}
            loop = hotloop.Loop(
                model, optimizer, loss, device="cpu", plan="plain", scheduler=scheduler, train_metrics=more
            )
            report = loop.fit(
                DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(2)),
                epochs=epochs,
                validate=DataLoader(data, 20),
                metrics=more,
                on_step=lambda record: print("step", record.step),
                on_epoch=lambda record: print("epoch", record.epoch.number),
                log=str(folder) + ".jsonl",
                save=folder,
                resume=True,
                best="accuracy",
                patience=9,
                restore_best=True,
                progress=False,
            )
        same = [replace(each, seconds=0.0) for each in report.epochs]
        return (
            [*model.parameters()],
            same,
            report.best,
            report.steps,
            report.resumed,
            report.curve,
            capsys.readouterr().out,
        )

    expected = trained(tmp_path / "in order", shuffled=False)
    for number in range(4):
        found = trained(tmp_path / f"shuffled {number}", shuffled=True)
        assert all(torch.equal(a, b) for a, b in zip(expected[0], found[0], strict=True)), names
        assert found[1:] == expected[1:], names


def test_a_loop_tells_its_parts_and_their_moments_in_order() -> None:
    known = hotloop.Loop.parts()
    assert list(known)[-1] == "checkpoint", "it saves the state of all"
    assert known["schedule"] == ("epoch_done",)
    assert list(known).index("losses") < list(known).index("validation") < list(known).index("best")


@given(order=st.permutations("abcde"), first=st.lists(st.sampled_from("abcde"), unique=True, max_size=3))
def test_parts_come_in_the_order_given_but_behind_those_they_name(order: list[str], first: list[str]) -> None:
    late = {name: tuple(each for each in first if each < name) for name in order}
    parts = [type(name, (Part,), {"name": name, "after": (*late[name], "absent")}) for name in order]
    found = [part.name for part in in_order(parts)]
    assert sorted(found) == sorted(order)
    assert all(found.index(each) < found.index(name) for name in found for each in late[name])
    assert [name for name in found if name not in first and not late[name]] == [
        name for name in order if name not in first and not late[name]
    ]


def test_a_default_that_all_runs_would_share_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Seen\.norms.*__init__"):
        type("Seen", (Part,), {"__annotations__": {"norms": "Saved[list[float]]"}, "norms": []})
