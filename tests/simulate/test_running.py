"""Scripts in processes of their own: run as Python would, ended in time, told as they ended."""

from pathlib import Path

import pytest

from hotloop.apps.simulate.cards import card
from hotloop.errors import BadArgument

from ..processes import gone
from .conftest import CARD

RTX = card("rtx4090")
LOOP = """
import torch
from torch import nn

model = nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step(device="cuda"):
    optimizer.zero_grad()
    loss = model(torch.randn(3, 4, device=device)).mean()
    loss.backward()
    optimizer.step()
    return loss


"""


def test_a_script_sees_what_python_would_show_it(run) -> None:
    ran = run("arguments", "--batch", "7")
    assert ran.out == "batch 7 __main__ Test GPU True\n"
    assert ran.err == ""
    assert (ran.result.gpu, ran.result.steps, ran.result.completed) == ("test", 3, 3)
    assert (ran.result.error, ran.result.findings) == (None, ())


@pytest.mark.parametrize("script", ["attention", "api"])  # and in `test_dispatch.py` the recurrent one
def test_healthy_scripts_make_their_steps_and_have_no_findings(script: str, run) -> None:
    ran = run(script)
    assert ran.result.error is None, ran.result.error
    assert ran.result.completed == 3
    assert ran.result.findings == ()


def test_one_as_wide_as_gpt2_makes_its_steps(run) -> None:
    ran = run("attention", "small", steps=1)
    assert (ran.result.completed, ran.result.error, ran.result.findings) == (1, None, ())


def test_modules_beside_the_script_are_found_and_nothing_is_left(run, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WIDTH = 4\n")
    ran = run(LOOP + "from beside import WIDTH\nassert WIDTH == 4\nwhile True:\n    step()\n")
    assert ran.result.completed == 3


def test_files_are_named_as_seen_from_the_script_wherever_it_goes(run, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    ran = run(LOOP + f"import os\nos.chdir({str(tmp_path / 'folder')!r})\nstep().item()  # waits\n")
    assert [(sync.file, sync.line) for sync in ran.result.syncs] == [("train.py", ran.line("# waits"))]


def test_an_error_of_the_script_is_told_as_python_would(run) -> None:
    ran = run(LOOP + "step()\nraise ValueError('such is life')\n")
    assert ran.result.completed == 1
    assert ran.result.error == ran.err
    assert ran.err.startswith("Traceback (most recent call last):\n")
    assert ran.err.endswith("ValueError: such is life\n")
    assert "hotloop" not in ran.err
    assert "runpy" not in ran.err


def test_shapes_that_do_not_fit_are_an_error_of_the_script(run) -> None:
    ran = run(LOOP + "model(torch.randn(3, 5, device='cuda'))\n")
    assert "RuntimeError" in ran.result.error
    assert "simulate/dispatch" not in ran.result.error
    assert f"line {ran.line('torch.randn(3, 5')}" in ran.result.error


def test_the_time_limit_ends_a_script_that_goes_on_for_ever(run) -> None:
    for steps, status, wait in ((1, "cut-short", "pass"), (2, "completed", "time.sleep(9)")):  # of two, memory is known
        script = LOOP + "step()\n" * steps + f"import time\nwhile True:\n    {wait}\n"
        ran = run(script, time_limit=1.0, card=RTX)
        assert (ran.result.completed, ran.result.status) == (steps, status)
        said = [*ran.result.notes, *(finding.message for finding in ran.result.findings)]
        assert any("time limit of 1 s" in words for words in said)
        assert (ran.result.fits is True) == (steps == 2)


def test_a_loop_that_waits_for_a_value_is_broken_out_of(run) -> None:
    body = "x = torch.rand(2, device='cuda')\nwhile x.max() > 0.1:\n    pass\nstep()\nprint('ended')\n"
    ran = run(LOOP + body)
    assert ran.out == "ended\n"
    assert any(f"train.py:{ran.line('x.max()')}" in note for note in ran.result.notes)


def test_a_loop_that_no_answer_ends_is_ended(run) -> None:
    sooner = "import hotloop.apps.simulate.values\nhotloop.apps.simulate.values.LIMIT = 700\n"
    ran = run(LOOP + sooner + "x = torch.rand(2, device='cuda')\nwhile x.max().item() != 0.123:\n    pass\n")
    (found,) = ran.result.findings
    assert (ran.result.status, found.line) == ("cut-short", ran.line("x.max()"))
    assert "waits for a value" in found.message


@pytest.mark.parametrize(
    ("body", "status", "words", "line"),
    [
        ("step()\nraise ValueError('such is life')  # here\n", "failed", "ValueError: such is life", True),
        ("step()\nraise SystemExit(5)  # here\n", "failed", "exit code 5 after 1 of 3 steps", True),
        ("raise ValueError('\\nwhat happened\\nand why')  # here\n", "failed", ": ValueError: what happened", True),
        ("raise SystemExit('no data')  # here\n", "failed", "ended itself with 'no data'", True),
        ("import a_package_that_is_absent.core  # here\n", "failed", "No module named", True),
        ("def broken(:  # here\n", "failed", "SyntaxError", True),
        ("print(torch.zeros(2).sum())\n", "no-steps", "without a training step", False),
        ("raise SystemExit\n", "no-steps", "without a training step", False),
        ("model.cpu()\nstep('cpu')\n", "no-gpu", "on the CPU alone and never uses the GPU", False),
    ],
)
def test_a_script_that_did_not_train_gets_no_verdict(run, body: str, status: str, words: str, line: bool) -> None:
    ran = run(LOOP + body, timed=True, card=RTX, trains=True)
    (found,) = ran.result.findings
    assert (ran.result.status, found.level, found.code) == (status, "error", status)
    assert words in found.message
    assert "and why" not in found.message
    assert found.line == (ran.line("# here") if line else 0)
    assert (ran.result.fits, ran.result.peak, ran.result.step_ms) == (None, None, None)
    assert "hotloop" not in ran.err
    assert "ast.py" not in ran.err
    if "absent" in body:
        assert "pip install" in found.fix
    if status == "no-gpu":
        assert 'model.to("cuda")' in found.fix
    if "no data" in body:
        assert ran.err == "no data\n"  # as Python does


@pytest.mark.parametrize(
    ("body", "fix"),
    [
        (
            "import os, torch.distributed as dist\n"
            "os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='0', RANK='0', WORLD_SIZE='1')\n"
            "dist.init_process_group('nccl')  # here\n",
            "without torch.distributed",
        ),
        (
            "from torch.nn.attention.flex_attention import flex_attention\n"
            "q = torch.randn(1, 1, 128, 16).cuda()\n"
            "flex_attention(q, q, q)  # here\n",
            "",
        ),
        (
            "import torch.multiprocessing as mp\nmp.set_start_method('spawn', force=True)\nmodel.share_memory()\n"
            "mp.Process(target=print, args=(0, [model])).start()  # here\n",
            "call its function here",
        ),
    ],
)
def test_what_cannot_be_simulated_is_no_failure_of_the_script(run, body: str, fix: str) -> None:
    ran = run(LOOP + "step()\n" + body)
    (found,) = ran.result.findings
    assert (ran.result.status, found.code, found.line) == ("not-simulated", "not-simulated", ran.line("# here"))
    assert "cannot be simulated after 1 of 3 steps" in found.message
    assert "hotloop" not in found.message
    assert fix in found.fix


def test_one_that_ends_after_fewer_steps_than_asked_for_has_a_verdict(run) -> None:
    ran = run(LOOP + "step()\nraise SystemExit(0)\n", card=RTX)
    assert (ran.result.status, ran.result.completed, ran.result.fits) == ("completed", 1, True)


def test_one_that_catches_a_shortage_and_gives_up_does_not_fit(run) -> None:
    body = """
try:
    torch.empty(1 << 38, device="cuda")
except torch.OutOfMemoryError:
    raise SystemExit(1)
"""
    ran = run(LOOP + body, card=RTX)
    assert (ran.result.status, ran.result.fits) == ("out-of-memory", False)


def test_one_that_catches_a_shortage_and_trains_on_fits(run) -> None:
    body = """
def ask():
    try:
        torch.empty(1 << 38, device="cuda")  # too large
    except torch.OutOfMemoryError:
        pass
ask()
step()
"""
    ran = run(LOOP + body, card=RTX)
    assert (ran.result.status, ran.result.fits, ran.result.findings) == ("completed", True, ())
    assert any(f"train.py:{ran.line('too large')}" in each and "went on" in each for each in ran.result.notes)
    assert run(LOOP + body + "ask()\n", card=RTX).result.fits is False  # and then it gave up


def test_what_a_script_started_ends_with_it(run) -> None:
    body = """
import subprocess, sys
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(started.pid)
while True:
    step()
"""
    assert gone([int(run(LOOP + body).out)])


def test_one_that_catches_everything_is_ended_all_the_same(run) -> None:
    body = "while True:\n    try:\n        step()\n    except BaseException:\n        print('no')\n"
    ran = run(LOOP + body, time_limit=60.0)
    assert ran.result.completed == 3


def test_arguments_that_cannot_be_meant(simulator, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="no file"):
        simulator.run(tmp_path / "absent.py", [], CARD)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(BadArgument, match="steps=0"):
        simulator.run(tmp_path / "train.py", [], CARD, steps=0)
