"""Invented numbers are plausible, those of the host are known, and a script that they may have ended is told so."""

import pytest

from .test_running import LOOP


@pytest.mark.parametrize(
    ("check", "status"),
    [
        ("if loss < 5: break", "completed"),
        ("if float(loss) < 5: break", "completed"),
        ("assert loss.item() > 5", "failed"),
        ("if loss < 5: raise SystemExit('diverged')", "failed"),
        ("if loss < 0.01 or math.isnan(loss.item()) or math.exp(loss) > 100: break", None),
    ],
)
def test_a_script_that_an_invented_value_may_have_ended_is_told_so(run, check: str, status: str | None) -> None:
    ran = run(LOOP + f"import math\nwhile True:\n    loss = step()\n    {check}  # the branch\n")
    told = [note for note in ran.result.notes if "invented" in note]
    if status is None:
        assert (ran.result.status, ran.result.completed, ran.result.findings, told) == ("completed", 3, (), [])
    else:
        assert (ran.result.status, ran.result.completed) == (status, 1)
        assert "ended after 1 of 3 steps" in told[0]
        assert f"train.py:{ran.line('# the branch')}" in told[0]


def test_checks_of_libraries_pass(run) -> None:
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
    assert (ran.result.completed, ran.result.error) == (3, None)


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
        assert "cuda:0" in found.fix
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
