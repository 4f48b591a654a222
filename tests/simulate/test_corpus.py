"""The corpus is sound: its scripts run where there is no GPU, and a simulation of each says what it expects."""

import ast
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hotloop.cli import main

from ..thorough import some
from ..warm import Warm
from .corpus import SCRIPTS, Script, complaints, load, parse, scripts

CORPUS = scripts()
TWINS = {script.twin for script in CORPUS}  # are run in what is made of them, too
SECONDS = {SCRIPTS / "healthy" / "gpt2_generate.py"}  # transformers is imported for `bert_ids_on_cpu`, too
SIMULATED = some(CORPUS, [script for script in CORPUS if script.path not in TWINS | SECONDS])
ON_THE_CPU = [script for script in CORPUS if script.runs == "cpu"]
REHEARSED = some(ON_THE_CPU, ON_THE_CPU[::8])

COUNT = """
import runpy, sys
from torch.optim.optimizer import register_optimizer_step_post_hook

steps = []
register_optimizer_step_post_hook(lambda *_: steps.append(1))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(len(steps))
"""


def named(script: Script) -> str:
    return script.name


@pytest.mark.parametrize("script", CORPUS, ids=named)
def test_a_script_is_whole_and_differs_from_its_twin_by_its_fault_alone(script: Script) -> None:
    ast.parse(script.text)
    assert 15 <= len(script.text.splitlines()) <= 70
    assert script.about, "a healthy script has a style, another says why it is not"
    assert 0 < script.steps <= script.updates
    assert script.runs in ("cpu", "cuda")
    parts = {each.part for each in script.expectations if each.times}
    assert ("findings" in parts) == (script.kind == "broken")
    assert parts & {"syncs", "copies"} or script.kind != "slow"
    if script.kind != "healthy":
        assert script.twin is not None
        twin = load(script.twin)
        assert (twin.kind, twin.steps, twin.runs) == ("healthy", script.steps, script.runs)


@pytest.mark.parametrize("script", REHEARSED, ids=named)
def test_a_script_runs_on_the_cpu_where_nothing_is_wrong_with_it(script: Script, tmp_path: Path, warm: Warm) -> None:
    (count := tmp_path / "count.py").write_text(COUNT)
    (folder := tmp_path / "rehearsal").mkdir()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "torch")  # torch's own, not the script's
    done = warm.run(count, script.write(tmp_path), cwd=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) == script.updates
    assert not list(folder.iterdir()), "the script leaves nothing behind"


@pytest.mark.parametrize("script", SIMULATED, ids=named)
def test_a_simulation_finds_what_is_wrong_and_nothing_else(
    script: Script,
    simulator: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("hotloop.apps.simulate.running.Simulator", lambda **_: nullcontext(simulator))
    command = ["hotloop", "simulate", "--json", "--gpu", "h200", "--steps", "100", str(script.write(tmp_path))]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    assert printed.out.lstrip().startswith("{"), printed.err
    assert not complaints(script, json.loads(printed.out))


# What follows tests the corpus's own words: a wrong expectation must not pass for a right one.

BROKEN = SCRIPTS / "broken" / "example.py"
TEXT = """# why: an example of a reason
#      that is long.
# twin: digits_argparse.py
# steps: 2
# expect: mixed-devices error at loss, fix y.to(
# expect: sync item or bool at step, times 2
# expect: no sync at quick
# expect: copy to the host at step, pinned, non-blocking
# expect: note compile

loss = f(x, y)  # <- loss
print(loss.item())  # <- step
total += loss  # <- quick
"""


def right() -> dict[str, Any]:
    """A result that is as the example expects."""
    finding = {"code": "mixed-devices", "level": "error", "file": "example.py", "line": 11, "count": 3}
    finding |= {"message": "y is on the CPU", "fix": "y = y.to(device)"}
    copy = {"file": "example.py", "line": 12, "direction": "to the host", "bytes": 4, "count": 1}
    return {
        "completed": 2,
        "findings": [finding],
        "syncs": [{"file": "example.py", "line": 12, "kind": "item", "count": 2}],
        "copies": [copy | {"pinned": True, "blocking": False}],
        "notes": ["torch.compile is passed over"],
    }


def test_an_example_is_understood_and_the_right_result_has_no_complaints() -> None:
    script = parse(TEXT, BROKEN)
    assert (script.kind, script.steps, script.runs) == ("broken", 2, "cpu")
    assert script.about == "an example of a reason that is long."
    assert script.twin == SCRIPTS / "healthy" / "digits_argparse.py"
    assert complaints(script, right()) == []


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("findings", {"line": 12}),
        ("findings", {"code": "numpy-of-cuda"}),
        ("findings", {"fix": "x = x.to(device)"}),
        ("findings", {"file": "other.py"}),
        ("syncs", {"line": 11}),
        ("syncs", {"kind": "nonzero"}),
        ("syncs", {"count": 1}),
        ("syncs", {"line": 13}),
        ("copies", {"pinned": False}),
        ("copies", {"blocking": True}),
        ("copies", {"direction": "to the device"}),
    ],
    ids=str,
)
def test_anything_else_has(part: str, change: dict[str, Any]) -> None:
    result = right()
    result[part][0] |= change
    assert complaints(parse(TEXT, BROKEN), result)


@pytest.mark.parametrize("lacks", [{"completed": 1}, {"findings": []}, {"syncs": []}, {"copies": []}, {"notes": []}])
def test_so_has_a_result_that_lacks_a_part_or_did_not_end(lacks: dict[str, Any]) -> None:
    assert complaints(parse(TEXT, BROKEN), right() | lacks)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("at quick", "at nowhere", "a mark that is not there: nowhere"),
        ("error at loss", "mistake at loss", "neither a finding"),
        ("sync item or bool at step, times 2", "sync item or bool", "at a mark"),
        ("times 2", "times many", "unknown ending: times many"),
        ("times 2", "pinned", "unknown ending: pinned"),
        ("# expect: no sync at quick\n", "", r"the marks at lines \[12\]"),
        ("# expect: no sync at quick\n", "# expect: nothing\n", "findings and `nothing`"),
        ("expect", "suspect", "expects something"),
    ],
)
def test_a_wrong_expectation_is_refused(before: str, after: str, words: str) -> None:
    assert before in TEXT
    with pytest.raises(ValueError, match=words):
        parse(TEXT.replace(before, after), BROKEN)
