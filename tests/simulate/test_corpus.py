"""The corpus is sound: its scripts run where there is no GPU, and a simulation of each says what it expects."""

import ast
import difflib
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotloop.cli import main

from ..warm import Warm
from .corpus import SCRIPTS, Script, complaints, expectation, load, parse, scripts

CORPUS = scripts()
ON_THE_CPU = [script for script in CORPUS if script.runs == "cpu"]

# Runs scripts after one another in one process that has imported torch, each in a child of its own.
REHEARSE = """
import gc, json, os, runpy, sys, traceback
import numpy, torch
import torch._dynamo  # optimizers import it, slowly: once for all
from torch.optim.optimizer import register_optimizer_step_post_hook

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # so that the children share it
for script in sys.argv[1:]:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    said, steps = "did not end", []
    try:
        register_optimizer_step_post_hook(lambda *_: steps.append(1))
        sys.argv = [script]
        sys.stdout = open(os.devnull, "w")
        runpy.run_path(script, run_name="__main__")
        said = len(steps)
    except BaseException:
        said = traceback.format_exc()
    finally:
        os.write(1, (json.dumps([script, said]) + "\\n").encode())
        os._exit(0)
"""


def named(script: Script) -> str:
    return script.name


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> dict[str, Any]:
    """How often optimizers stepped in each script on the CPU, or how it failed."""
    folder = tmp_path_factory.mktemp("rehearsal")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("torch"))  # torch's own, not the scripts'
    rehearse = tmp_path_factory.mktemp("rehearse") / "rehearse.py"
    rehearse.write_text(REHEARSE)
    done = warm.run(rehearse, *(script.path for script in ON_THE_CPU), cwd=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir()), "the scripts leave nothing behind"
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("script", CORPUS, ids=named)
def test_a_script_is_whole(script: Script) -> None:
    text = script.path.read_text(encoding="utf-8")
    ast.parse(text)
    assert 15 <= len(text.splitlines()) <= 70
    assert script.about, "a healthy script has a style, another says why it is not"
    assert 0 < script.steps <= script.updates
    assert script.runs in ("cpu", "cuda")
    findings = [each for each in script.expectations if each.part == "findings" and each.demand == "must"]
    waits = [each for each in script.expectations if each.part in ("syncs", "copies") and each.demand == "must"]
    assert bool(findings) == (script.kind == "broken")
    assert waits or script.kind != "slow"


@pytest.mark.parametrize("script", [s for s in CORPUS if s.kind != "healthy"], ids=named)
def test_a_script_differs_from_its_twin_by_its_fault_alone(script: Script) -> None:
    assert script.twin is not None
    twin = load(script.twin)
    assert twin.kind == "healthy"
    assert (twin.steps, twin.runs) == (script.steps, script.runs)
    pair = [_code(each.path) for each in (twin, script)]
    changed = [line for line in difflib.unified_diff(*pair, lineterm="", n=0) if line[:1] in "+-"][2:]
    assert 1 <= len(changed) <= 14, changed


def _code(path: Path) -> list[str]:
    """The lines of a script without comments and marks."""
    return ast.unparse(ast.parse(path.read_text(encoding="utf-8"))).splitlines()


@pytest.mark.parametrize("script", ON_THE_CPU, ids=named)
def test_a_script_runs_on_the_cpu_where_nothing_is_wrong_with_it(script: Script, rehearsed: dict[str, Any]) -> None:
    assert rehearsed[str(script.path)] == script.updates


@pytest.mark.parametrize("script", CORPUS, ids=named)
def test_a_simulation_finds_what_is_wrong_and_nothing_else(
    script: Script, simulator: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hotloop.apps.simulate.running.Simulator", lambda **_: nullcontext(simulator))
    command = ["hotloop", "simulate", "--json", "--gpu", "h200", "--steps", "100", str(script.path)]
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
# expect: maybe needs-cpu or numpy-of-cuda error or warning at late
# expect: sync item or bool at step, times 2
# expect: no sync at quick
# expect: copy to the host at step, pinned, non-blocking
# expect: note compile

loss = f(x, y)  # <- loss
other = loss + y  # <- late
print(loss.item())  # <- step
total += loss  # <- quick
"""


def right() -> dict[str, Any]:
    """A result that is as the example expects."""
    finding = {"code": "left-on-cpu", "level": "error", "file": "example.py", "line": 12, "count": 3}
    finding |= {"message": "y is on the CPU", "fix": "y = y.to(device)"}
    copy = {"file": "example.py", "line": 14, "direction": "to the host", "bytes": 4, "count": 1}
    return {
        "completed": 2,
        "findings": [finding],
        "syncs": [{"file": "example.py", "line": 14, "kind": "item", "count": 2}],
        "copies": [copy | {"pinned": True, "blocking": False}],
        "notes": ["torch.compile is passed over"],
    }


def test_an_example_is_understood() -> None:
    script = parse(TEXT, BROKEN)
    assert (script.kind, script.steps, script.runs) == ("broken", 2, "cpu")
    assert script.about == "an example of a reason that is long."
    assert script.twin == SCRIPTS / "healthy" / "digits_argparse.py"
    assert [sorted(each.lines) for each in script.expectations] == [[12], [13], [14], [15], [14], []]
    assert script.expectations[1].names == ("needs-cpu", "numpy-of-cuda")
    assert script.expectations[1].levels == ("error", "warning")
    assert [each.demand for each in script.expectations] == ["must", "maybe", "must", "no", "must", "must"]


def test_the_right_result_has_no_complaints() -> None:
    assert complaints(parse(TEXT, BROKEN), right()) == []


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("findings", {"line": 13}),
        ("findings", {"code": "numpy-of-cuda"}),
        ("findings", {"level": "warning"}),
        ("findings", {"fix": "x = x.to(device)"}),
        ("findings", {"file": "other.py"}),
        ("syncs", {"line": 12}),
        ("syncs", {"kind": "nonzero"}),
        ("syncs", {"count": 1}),
        ("syncs", {"line": 15}),
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


def test_so_has_a_result_that_lacks_a_part_or_did_not_end() -> None:
    script = parse(TEXT, BROKEN)
    assert [words for words in complaints(script, right() | {"completed": 1}) if "1 steps" in words]
    for part in ("findings", "syncs", "copies", "notes"):
        assert complaints(script, right() | {part: []})


def test_a_warning_is_allowed_where_a_wait_is_expected_and_nowhere_else() -> None:
    script, result = parse(TEXT, BROKEN), right()
    warning = result["findings"][0] | {"code": "sync-every-step", "level": "warning", "line": 14}

    def with_warning(**change: Any) -> list[str]:
        return complaints(script, result | {"findings": [*result["findings"], warning | change]})

    assert with_warning() == []
    assert with_warning(level="info", line=1) == []
    assert with_warning(line=15)
    assert with_warning(line=1)
    assert with_warning(level="error")


def test_where_nothing_is_expected_any_finding_is_too_much() -> None:
    script = parse("# style: short\n# steps: 2\n# expect: nothing\n\nx = 1\n", SCRIPTS / "healthy" / "example.py")
    assert complaints(script, right() | {"findings": []}) == []
    assert complaints(script, right())


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("at late", "at nowhere", "a mark that is not there: nowhere"),
        ("error at loss", "mistake at loss", "neither a finding"),
        ("sync item or bool at step, times 2", "sync item or bool", "at which mark"),
        ("times 2", "times many", "unknown ending: times many"),
        ("times 2", "pinned", "unknown ending: pinned"),
        ("non-blocking", "slow", "unknown ending: slow"),
        ("# expect: no sync at quick\n", "", r"the marks at lines \[14\]"),
        ("# expect: no sync at quick\n", "# expect: nothing\n", "findings and `nothing`"),
    ],
)
def test_a_wrong_expectation_is_refused(before: str, after: str, words: str) -> None:
    assert before in TEXT
    with pytest.raises(ValueError, match=words):
        parse(TEXT.replace(before, after), BROKEN)


def test_a_script_must_expect_something() -> None:
    with pytest.raises(ValueError, match="expects something"):
        parse("# style: short\n\nx = 1\n", BROKEN)


PIECES = [
    "sync",
    "copy",
    "to the host",
    "mixed-devices",
    "error",
    "at",
    "or",
    "here",
    "no",
    "maybe",
    "times 3",
    "fix x",
    ",",
]


@given(st.lists(st.sampled_from(PIECES), max_size=8).map(" ".join) | st.text(max_size=40))
@example("no sync at here")
@example("note compile")
def test_any_words_are_understood_or_refused(said: str) -> None:
    refused = ""
    try:
        understood = expectation(said, {"here": frozenset([7])})
    except ValueError as error:
        refused = str(error)
    assert f"`{said}`" in refused or understood.said == said
    assert refused or understood.lines == {7} or understood.part == "notes"
