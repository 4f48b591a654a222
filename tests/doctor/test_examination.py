"""Whole examinations: turns of real scripts in processes of their own, and what is made of turns that are given."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from hotloop.apps.doctor.diagnosis import Diagnosis, Finding, Turn
from hotloop.apps.doctor.diagnosis_page import lead
from hotloop.apps.doctor.examination import Examination, ScriptFailed, in_patch
from hotloop.apps.doctor.examined_script import ScriptRun
from hotloop.apps.doctor.looking import LOOK
from hotloop.apps.doctor.seen import COLLECTS, KEEPS_ZEROS, Location, SeenLine, SeenScript
from hotloop.apps.doctor.timing import TURN
from hotloop.errors import BadArgument

HEAD = """
import os, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(TensorDataset(torch.ones(4000, 8), torch.arange(4000) % 4), batch_size=4)
"""
STEPS = """
for images, labels in loader:
    optimizer.zero_grad()
    loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def _short_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_children: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hotloop.apps.doctor.examination.SECONDS", 0.1)


def of(diagnosis: Diagnosis, rule: str) -> Finding:
    (found,) = (finding for finding in diagnosis.findings if finding.rule == rule)
    return found


def test_fixes_are_confirmed_by_turns_and_make_one_patch(tmp_path: Path) -> None:
    """Of a module, and of a module that it imports."""
    package = tmp_path / "project"
    package.mkdir()
    (package / "__init__.py").touch()
    helpers, train = package / "helpers.py", package / "train.py"
    helpers.write_text(
        "import gc\n\nkept = [[] for _ in range(300_000)]  # it takes a while to look through\n\n"
        "def after():\n    gc.collect()\n    return None\n"
    )
    script = f"import gc\nfrom project.helpers import after\n{HEAD}{STEPS}    after()\n    gc.collect()\n"
    script = script.replace("in loader", "in [next(iter(loader))] * 99")
    train.write_text(script)
    said: list[str] = []
    examination = Examination("project.train", module=True, steps=6, told=said.append)
    diagnosis = examination.run()
    confirmed = {each.where: each for each in diagnosis.confirmed if each.rule == "collects-garbage"}
    assert set(confirmed) == {"project/helpers.py:6", f"project/train.py:{len(script.splitlines())}"}, diagnosis
    for each in confirmed.values():
        assert len(each.gain.after) >= 3
        assert each.losses.startswith("all 10 losses are equal to the bit")
    assert diagnosis.findings[0] in diagnosis.confirmed
    assert diagnosis.together.times > 1.2
    assert "--- a/project/helpers.py\n+++ b/project/helpers.py\n" in diagnosis.diff
    assert diagnosis.diff.count("-    gc.collect()") == 2
    assert examination.changed[train] == (script, script.replace("    gc.collect()\n", ""))
    assert helpers.read_text() == examination.changed[helpers][0]  # nothing was written
    assert said[:2] == ["looking at its steps", "timing the unchanged script"]


EVALUATED = """
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.01 * torch.is_grad_enabled())
        return super().forward(x)


model = Slow(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
for epoch in range(2):
STEPS
    model.eval()
    for images, labels in loader:
        model(images)
    os.system("touch after")  # such as a checkpoint of an epoch that was cut short
""".replace("STEPS", indent(STEPS, "    "))


def test_an_evaluation_that_steps_do_not_reach_is_timed_after_a_shortened_epoch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + EVALUATED)
    diagnosis = Examination("train.py", steps=10).run()
    found = of(diagnosis, "evaluates-with-gradients")
    assert found.of_evaluation
    assert found.verdict == "confirmed", found
    assert found.losses == "all 22 outputs are equal to the bit"
    assert "+    with torch.no_grad():\n+        for images, labels in loader:" in diagnosis.diff
    assert found.gain.times > 2
    assert not (tmp_path / "after").exists()
    assert lead(diagnosis).endswith(" in the evaluation.")
    assert diagnosis.fixes == 1


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
    tmp_path: Path, script: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "train.py").write_text(script)
    with pytest.raises(error, match=r"train\.py") as raised:
        Examination("train.py").run()
    assert message in str(raised.value)
    assert "fix: " in str(raised.value)


# Turns that are given

FAULTY = """\
import gc, torch
for epoch in range(9):
    for batch in loader:
        optimizer.zero_grad(set_to_none=False)
        criterion(batch).backward()
        gc.collect()
        optimizer.step()
"""
EQUAL = (1.0,) * 14
Answer = Callable[[str, ScriptRun], dict[str, Any]]
Examine = Callable[..., Diagnosis]


def turn(step: float, losses: tuple[float, ...] = EQUAL) -> dict[str, Any]:
    return {TURN: Turn(step, losses, None).to_json()}


def pace(text: str) -> float:
    return 2.0 if "gc.collect()" in text else 1.0


@pytest.fixture
def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Examine]:
    """Examines a script in the order of its text: `answer` gives a turn for the text and the request."""
    file = tmp_path / "train.py"
    nothing: dict[str, Any] = {"matmuls": {}, "matmul_precision": "highest", "searches_algorithms": False}
    nothing |= dict.fromkeys(("files", "loaders", "optimizers", "calls", "backwards", "growth"), ())

    def call(answer: Answer, *, script: str = FAULTY, faults: tuple[str, ...] = (COLLECTS,), **shown: Any) -> Diagnosis:
        file.write_text(script)
        numbers = {COLLECTS: 6, KEEPS_ZEROS: 4}
        lines = tuple(SeenLine(fault, Location(str(file), numbers[fault]), 1.0) for fault in faults)
        first = {"device": "cpu", "device_name": "a CPU", "steps": 40, "has_ended": False, "step": 1.0, "lines": lines}
        seen = SeenScript(**{**nothing, **first, "has_anomaly_mode": False, **shown})

        class GivenTurns:
            def __enter__(self) -> "GivenTurns":
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def run(self, request: ScriptRun) -> dict[str, Any]:
                if not request.steps:
                    return {LOOK: seen.to_json(), "output": []}
                return {
                    "error": None,
                    "output": [],
                    **answer((request.sources or {str(file): script})[str(file)], request),
                }

        monkeypatch.setattr("hotloop.apps.doctor.examination.Turns", GivenTurns)
        return Examination("train.py", steps=100).run()

    yield call
    assert list(tmp_path.iterdir()) == [file]


NUMBERS = count()


@pytest.mark.parametrize(
    ("answer", "verdict", "why"),
    [
        (lambda text, _: turn(pace(text), (pace(text),) * 14), "losses differ", "2.00× as fast"),
        (lambda text, _: turn(pace(text), (float(next(NUMBERS)),)), "not compared", "two unchanged runs differ"),
        (lambda text, _: turn(2.0) if "gc.collect()" in text else {"error": "it broke"}, "fails", "it broke"),
    ],
)
def test_what_speaks_against_a_fix_is_its_verdict(examine: Examine, answer: Answer, verdict: str, why: str) -> None:
    diagnosis = examine(answer)
    found = of(diagnosis, "collects-garbage")
    assert found.verdict == verdict
    assert why in found.why
    assert not diagnosis.diff


def test_what_another_fault_hides_is_tried_on_top_of_its_fix(examine: Examine) -> None:
    def answer(text: str, _: ScriptRun) -> dict[str, Any]:
        return turn(4.0 if "gc.collect()" in text else 2.0 if "=False" in text else 1.0)

    diagnosis = examine(answer, faults=(KEEPS_ZEROS, COLLECTS))
    first, then = diagnosis.findings
    assert (first.rule, first.gain.times, first.on_top) == ("collects-garbage", 2, False)
    assert (then.rule, then.gain.times, then.on_top) == ("writes-zeros", 2, True)
    assert diagnosis.together.times == 4
    assert (diagnosis.fixes, diagnosis.losses) == (2, "all 14 losses are equal to the bit")


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_short_script_is_timed_for_all_of_its_steps(examine: Examine, has_ended: bool) -> None:
    """Whether its end was seen already, or comes in the first turn."""

    def answer(text: str, request: ScriptRun) -> dict[str, Any]:
        return turn(pace(text)) if request.steps <= 18 else {TURN: None, "steps": 22}

    diagnosis = examine(answer, steps=22 if has_ended else 14, has_ended=has_ended)
    assert diagnosis.steps == 22 - 4
    assert of(diagnosis, "collects-garbage").verdict == "confirmed"


def test_a_script_that_ends_sooner_each_time_is_told_so(examine: Examine) -> None:
    steps = count(44, -12)
    with pytest.raises(ScriptFailed, match="did not make its 44 steps again: it ended after 32 steps"):
        examine(lambda text, request: {TURN: None, "steps": next(steps)})


@pytest.mark.parametrize(
    ("without", "with_fix", "verdict", "why"),
    [
        (turn(2.0), {"error": "AssertionError: needs grad"}, "fails", "with the fix, AssertionError: needs grad"),
        ({TURN: None, "error": "it came never"}, None, "not verified", "its line did not run: it came never"),
    ],
)
def test_an_evaluation_that_cannot_be_timed_says_why(
    examine: Examine, without: dict[str, Any], with_fix: dict[str, Any], verdict: str, why: str
) -> None:
    script = FAULTY + "    model.eval()\n    for batch in loader:\n        model(batch)\n"
    diagnosis = examine(lambda text, _: with_fix if "no_grad" in text else without, script=script, faults=())
    found = of(diagnosis, "evaluates-with-gradients")
    assert (found.verdict, found.why) == (verdict, why)
    assert not diagnosis.diff


def test_a_file_elsewhere_is_named_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert in_patch(str(here / "a" / "train.py")) == "a/train.py"
    assert f"/{in_patch(str(tmp_path / 'train.py'))}" == str(tmp_path / "train.py")
