"""Numbers that are invented are plausible, and what a script decides by them is named and does not cut it short."""

import json
import math
import pickle

import pytest

from hotloop.apps.simulate.invented import Branches

from .test_running import LOOP

HERE = "/somewhere/train.py"  # a file of the person's own


def decided(expression: str, **names: object) -> tuple[object, list[int]]:
    """What an expression in a script gives, and the lines at which it made a decision."""
    branches = Branches()
    marked = {name: branches.marked(value) for name, value in names.items()}  # type: ignore[arg-type]
    scope: dict[str, object] = {**marked, "math": math, "json": json, "pickle": pickle}
    exec(compile(f"\n\nresult = {expression}", HERE, "exec"), scope)  # noqa: S102
    return scope["result"], [place.line for place in branches.seen]


@pytest.mark.parametrize(
    ("expression", "value", "branches"),
    [
        ("loss < 0.01", False, True),
        ("(loss + 3) / 2 > 1.5", True, True),
        ("5 > sum([loss, loss])", True, True),
        ("hits / 8 > 0.9", False, True),
        ("'more' if hits else 'none'", "more", True),
        ("math.exp(loss)", math.e, False),
        ("f'{loss:.2f} {hits}'", "1.00 3", False),
        ("json.loads(json.dumps([loss, hits]))", [1.0, 3], False),
        ("type(pickle.loads(pickle.dumps(loss))) is float", True, False),
        ("[10, 20, 30, 40][hits]", 40, False),
        ("hits * 2 + loss", 7.0, False),
    ],
)
def test_numbers_behave_as_numbers_and_tell_of_branches(expression: str, value: object, branches: bool) -> None:
    assert decided(expression, loss=1.0, hits=3) == (value, [3] if branches else [])


def test_a_branch_goes_the_other_way_where_that_is_asked_for() -> None:
    branches = Branches()
    branches.turned.add((HERE, 1))
    scope = {"loss": branches.marked(1.0)}
    exec(compile("here = loss < 5\nthere = loss < 5", HERE, "exec"), scope)  # noqa: S102
    assert (scope["here"], scope["there"]) == (False, True)


@pytest.mark.parametrize(
    ("condition", "turned"),
    [
        ("loss < 0.01", False),
        ("math.isnan(loss.item())", None),
        ("loss < 5", True),
        ("loss.item() < 5", True),
        ("float(loss) < 5", True),
        ("losses / number < 5", True),
        ("loss.detach().cpu().item() < 5", True),
    ],
)
def test_a_break_on_an_invented_value_is_named_and_does_not_end_the_simulation(
    run, condition: str, turned: bool | None
) -> None:
    body = f"""
import math
losses = 0
for number in range(1, 10):
    loss = step()
    losses += loss.item()
    assert 0 < math.exp(loss) < 100
    if {condition}:  # the branch
        break
"""
    ran = run(LOOP + body)
    line = ran.line("# the branch")
    assert (ran.result.status, ran.result.completed, ran.result.error) == ("completed", 3, None)
    assert (line in [branch.line for branch in ran.result.branches]) == (turned is not None)
    assert any(f"train.py:{line}" in note and "invented" in note for note in ran.result.notes) == (turned is not None)
    assert any("would have ended the script after 1 of 3 steps" in note for note in ran.result.notes) == bool(turned)


@pytest.mark.parametrize("check", ["assert loss.item() > 5", "if loss < 5: raise SystemExit('diverged')"])
def test_a_script_does_not_fail_by_an_invented_value(run, check: str) -> None:
    ran = run(LOOP + f"while True:\n    loss = step()\n    {check}  # the branch\n")
    assert (ran.result.status, ran.result.completed, ran.result.findings) == ("completed", 3, ())
    assert any(f"train.py:{ran.line('# the branch')} would have ended" in note for note in ran.result.notes)


def test_what_libraries_decide_is_not_the_scripts_branch(run) -> None:
    body = """
scaler = torch.amp.GradScaler("cuda")
for _ in range(5):
    loss = model(torch.randn(3, 4, device="cuda")).mean()
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    scaler.step(optimizer)
    scaler.update()
"""
    ran = run(LOOP + body)
    assert (ran.result.completed, ran.result.branches, ran.result.error) == (3, (), None)


def test_a_gpu_that_is_not_there_is_a_finding_at_its_line(run) -> None:
    lines = [
        'model.to("cuda:1")',
        'torch.zeros(3, device="cuda:1")',
        "torch.zeros(3).cuda(1)",
        "torch.cuda.set_device(1)",
        "torch.cuda.get_device_name(1)",
        'torch.cuda.memory_allocated("cuda:1")',
    ]
    ran = run(LOOP + "\n".join(lines) + "\nwhile True:\n    step()\n")
    assert sorted(found.line for found in ran.result.findings) == [ran.line(line) for line in lines]
    for found in ran.result.findings:
        assert (found.code, found.level) == ("no-such-device", "error")
        assert "invalid device ordinal" in found.message
        assert "--gpus 2" in found.fix
    assert (ran.result.completed, ran.result.error) == (3, None)


def test_what_follows_from_values_of_the_host_is_known(run) -> None:
    """As libraries check it: Wav2Vec2 refuses labels beyond its vocabulary."""
    body = """
import random, torch
from torch import nn

device, vocabulary = torch.device("cuda" if torch.cuda.is_available() else "cpu"), 32
model = nn.Linear(4, 2).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    labels = torch.randint(1, 30, (64, 1024)).to(device)
    if labels.max() >= vocabulary:
        raise ValueError(f"Label values must be <= vocab_size: {vocabulary}")
    assert len(labels.masked_select(labels > 10)) == int((labels > 10).sum())
    model(torch.randn(3, 4).to(device)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    held = torch.zeros(8, dtype=torch.long, device=device)
    there, here = held[2:5], torch.zeros(8, dtype=torch.long)
    for _ in range(30):
        number, at = random.randint(-9, 9), random.randrange(8)
        change = random.choice([
            lambda x: x.add_(number), lambda x: x[at:].mul_(number), lambda x: x[at].fill_(number),
            lambda x: x.copy_(x.flip(0)), lambda x: x.copy_(torch.arange(8, device=x.device).clamp(max=number)),
            lambda x: x[:at].copy_(torch.full((at,), number)), lambda x: x.masked_fill_(x > number, at),
        ])
        change(held), change(here)
    held[:0].copy_(torch.full((0,), 7))  # nothing, which changes nothing
    assert held.tolist() == here.tolist() and there.sum().item() == here[2:5].sum().item()
    held[0] = torch.rand((), device=device) * 9  # from here on it is not
    assert held.sum().item() == 1
print(held.device)
"""
    ran = run(body, trains=True)
    assert (ran.out, ran.result.completed, ran.result.findings) == ("", 3, ()), ran.err
