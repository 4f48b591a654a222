"""Whole examinations: turns of real scripts in processes of their own."""

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent

import pytest

from hotloop.apps.doctor.diagnosis import Diagnosis, Finding
from hotloop.apps.doctor.diagnosis_page import lead
from hotloop.apps.doctor.examination import Examination, ScriptFailed, in_patch
from hotloop.errors import BadArgument

HEAD = """
import gc, os, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
kept = [[] for _ in range(200_000)]  # a heap that takes a while to look through


class Items(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        ITEM
        return torch.full((8,), index / 4000), index % 4


model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(Items(), batch_size=4)
for images, labels in loader:
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
"""
Examine = Callable[..., tuple[Diagnosis, Examination]]


@pytest.fixture
def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_children: None) -> Examine:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hotloop.apps.doctor.examination.SECONDS", 0.2)

    def call(body: str = "", item: str = "pass", *, steps: int = 10, turns: int = 3, script: str = "", **options):
        script = script or HEAD.replace("ITEM", item) + indent(dedent(body), "    ")
        (tmp_path / "train.py").write_text(script)
        with Examination("train.py", steps=steps, turns=turns, **options) as examination:
            return examination.run(), examination

    return call


def of(diagnosis: Diagnosis, rule: str) -> Finding:
    (found,) = (finding for finding in diagnosis.findings if finding.rule == rule)
    return found


def test_fixes_are_confirmed_by_turns_and_make_one_patch(examine: Examine, tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    diagnosis, examination = examine("gc.collect()", item="time.sleep(0.002)", told=lambda *words: said.append(words))
    garbage, items = of(diagnosis, "collects-garbage"), of(diagnosis, "waits-for-items")
    assert garbage.verdict == "confirmed", diagnosis
    assert garbage.gain is not None
    assert len(garbage.gain.after) >= 3
    assert garbage.gain.times > 1.2
    assert garbage.losses.startswith("all 14 losses are equal to the bit")
    assert garbage.where == "train.py:29"
    assert diagnosis.findings[0] in diagnosis.confirmed
    assert diagnosis.diff.startswith("--- a/train.py\n+++ b/train.py\n")
    assert "-    gc.collect()" in diagnosis.diff
    assert items.verdict in ("confirmed", "no gain")  # as many cores as there are
    before, after = examination.changed[tmp_path / "train.py"]
    assert before == (tmp_path / "train.py").read_text()  # nothing was written
    assert "gc.collect()" not in after
    assert all(done <= total for _, done, total in said)
    assert ("looking at its steps", 0, 1) in said


def test_losses_that_differ_with_the_fix_speak_against_it(examine: Examine) -> None:
    diagnosis, examination = examine(
        """
        class Ring: pass
        ring = Ring(); ring.itself = ring; ring.weight = model.weight.data
        alive = __import__("weakref").ref(ring); del ring
        gc.collect()
        if alive() is not None:  # the training depends on what the collection frees
            model.weight.data.mul_(1.5)
        """
    )
    found = of(diagnosis, "collects-garbage")
    assert found.verdict == "losses differ", found
    assert "× as fast" in found.why
    assert not diagnosis.diff
    assert examination.changed == {}


def test_a_script_that_differs_from_run_to_run_cannot_be_compared(examine: Examine) -> None:
    diagnosis, _ = examine(
        """
        gc.collect()
        model.bias.data[0] = int.from_bytes(os.urandom(1), "big")
        """
    )
    found = of(diagnosis, "collects-garbage")
    assert found.verdict == "not compared", found
    assert "two unchanged runs differ" in found.why


def test_a_fix_with_which_the_script_fails_says_how(examine: Examine) -> None:
    diagnosis, _ = examine("assert loader.num_workers == 0, 'no workers here'", item="time.sleep(0.002)", turns=2)
    found = of(diagnosis, "waits-for-items")
    assert found.verdict == "fails"
    assert "AssertionError: no workers here" in found.why


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        (
            "raise RuntimeError('no data')",
            ScriptFailed,
            "train.py failed after 0 training steps: RuntimeError: no data",
        ),
        ("import os; os.kill(os.getpid(), 9)", ScriptFailed, "its process was killed"),
        ("import sys; sys.exit('bad option')", ScriptFailed, "it ended itself with 'bad option'"),
        ("x = 1", BadArgument, "train.py ended without a training step"),
        (
            "import torch\nw = torch.ones(1, requires_grad=True)\no = torch.optim.SGD([w])\n"
            "for _ in range(3):\n    w.sum().backward()\n    o.step()",
            BadArgument,
            "train.py ended after 3 training steps, and the doctor needs 8",
        ),
    ],
)
def test_a_script_that_does_not_train_is_told_why(
    examine: Examine, tmp_path: Path, script: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    with pytest.raises(error, match=r"train\.py") as raised, Examination("train.py") as examination:
        examination.run()
    assert message in str(raised.value)
    assert "fix: " in str(raised.value)


def test_a_short_script_is_timed_for_all_of_its_steps(examine: Examine) -> None:
    diagnosis, _ = examine("gc.collect(); kept.append([])\nif len(kept) == 200_022: break", steps=100)
    assert diagnosis.steps == 22 - 4
    assert of(diagnosis, "collects-garbage").verdict == "confirmed"


def test_a_module_and_the_modules_that_it_imports_are_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_children: None
) -> None:
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "helpers.py").write_text("import gc\n\ndef after():\n    gc.collect()\n    return None\n")
    script = HEAD.replace("ITEM", "pass").replace("import gc, os, time", "from project.helpers import after")
    (package / "train.py").write_text(script + "    after()\n")
    monkeypatch.chdir(tmp_path)
    with Examination("project.train", module=True, steps=10) as examination:
        diagnosis = examination.run()
    found = of(diagnosis, "collects-garbage")
    assert (found.verdict, found.where) == ("confirmed", "project/helpers.py:4")
    assert list(examination.changed) == [package / "helpers.py"]


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(BadArgument, match="turns=1"):
        Examination("train.py", turns=1)


EVALUATED = """
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.02 * torch.is_grad_enabled())
        return super().forward(x)


model = Slow(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
for epoch in range(2):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    for images, labels in loader:
        model(images)
    os.system("touch after")  # such as a checkpoint of an epoch that was cut short
"""


def test_an_evaluation_that_steps_do_not_reach_is_timed_after_a_shortened_epoch(
    examine: Examine, tmp_path: Path
) -> None:
    script = HEAD[: HEAD.index("for images")].replace("ITEM", "pass") + EVALUATED
    diagnosis, _ = examine(script=script)
    found = of(diagnosis, "evaluates-with-gradients")
    assert found.of_evaluation
    assert found.verdict == "confirmed", found
    assert found.losses == "all 22 outputs are equal to the bit"
    assert "+    with torch.no_grad():\n+        for images, labels in loader:" in diagnosis.diff
    assert found.gain is not None
    assert found.gain.times > 2
    assert not (tmp_path / "after").exists()
    assert lead(diagnosis).endswith(" in the evaluation.")
    assert diagnosis.fixes == 1


def test_an_evaluation_that_fails_with_the_fix_says_how(examine: Examine) -> None:
    checked = (
        "class Slow(nn.Linear):\n    def forward(self, x):\n        assert torch.is_grad_enabled(), 'needs grad'\n"
    )
    evaluated = EVALUATED.replace("class Slow(nn.Linear):\n    def forward(self, x):\n", checked)
    diagnosis, _ = examine(script=HEAD[: HEAD.index("for images")].replace("ITEM", "pass") + evaluated)
    found = of(diagnosis, "evaluates-with-gradients")
    assert found.verdict == "fails"
    assert found.why == "with the fix, AssertionError: needs grad"


def test_an_evaluation_that_no_epoch_leads_to_is_not_verified(examine: Examine) -> None:
    script = HEAD[: HEAD.index("for images")].replace("ITEM", "pass") + EVALUATED.replace(
        "in loader:", "in iter(lambda: next(iter(loader)), None):", 1
    )
    diagnosis, _ = examine(script=script)
    found = of(diagnosis, "evaluates-with-gradients")
    assert found.verdict == "not verified"
    assert found.why.startswith("its line did not run: ")
    assert not diagnosis.diff


def test_a_file_elsewhere_is_named_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert in_patch(str(here / "a" / "train.py")) == "a/train.py"
    assert f"/{in_patch(str(tmp_path / 'train.py'))}" == str(tmp_path / "train.py")
