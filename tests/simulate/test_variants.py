"""Changes made to a running script take what they take in a script in which a person wrote them."""

from collections.abc import Callable
from functools import cache

import pytest

from hotloop.apps.simulate.batch_setting import BatchSetting
from hotloop.apps.simulate.cards import card
from hotloop.apps.simulate.simulation_record import Simulation
from hotloop.apps.simulate.study import EVERYTHING

from ..thorough import some

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.layers(x))


class Net(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 1000)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


batch = 512
model = Net().cuda()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for number in range(18):
    x, y = torch.ones(batch, 256).cuda(), torch.randint(1000, (batch,)).cuda()
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    scheduler.step()
"""
CARD = card("rtx4090")


def changed(text: str, *pairs: tuple[str, str]) -> str:
    for before, after in pairs:
        assert before in text
        text = text.replace(before, after)
    return text


def twins_of(text: str, loss: str) -> dict[str, str]:
    """A script in which a person made each of the changes."""
    return {
        "bf16": changed(text, (loss, f"with torch.autocast('cuda', dtype=torch.bfloat16):\n        {loss}")),
        "fp16": changed(text, (loss, f"with torch.autocast('cuda', dtype=torch.float16):\n        {loss}")),
        "checkpointing": changed(text, ("x = block(x)", "x = checkpoint(block, x, use_reentrant=False)")),
        "accumulation:2": changed(
            text,
            ("batch = 512", "batch = 256"),
            ("optimizer.zero_grad()", "if number % 2 == 0: optimizer.zero_grad()"),
            ("    optimizer.step()", "    if number % 2: optimizer.step()"),
        ),
    }


TWINS = twins_of(SCRIPT, "loss = criterion(model(x), y)")


@pytest.fixture(scope="module")
def by_hand(simulator, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Simulation]:
    """A script as a person wrote it: each is simulated once."""
    path = tmp_path_factory.mktemp("plain") / "train.py"

    @cache
    def ran(text: str) -> Simulation:
        path.write_text(text)
        return simulator.run(path, [], CARD, steps=2, listeners=EVERYTHING)

    return ran


@pytest.mark.parametrize("change", some(TWINS, [each for each in TWINS if each != "fp16"]))
def test_a_change_takes_what_it_takes_where_a_person_wrote_it(change: str, run, by_hand) -> None:
    batch = BatchSetting("variable", "batch", 256) if change.startswith("accumulation") else None
    by_itself = run(SCRIPT, variant=change, batch=batch, steps=2, listeners=EVERYTHING, card=CARD).result
    written = by_hand(TWINS[change])
    assert by_itself.variant == change
    assert (by_itself.error, by_itself.completed) == (None, 2)
    assert (by_itself.peak, by_itself.categories) == (written.peak, written.categories)
    assert by_itself.step_ms == written.step_ms
    assert by_itself.peak.allocated < 0.95 * by_hand(SCRIPT).peak.allocated


@pytest.mark.parametrize("change", ["bf16", "checkpointing"])
def test_a_script_that_has_nothing_to_change_is_as_it_was(change: str, run, by_hand) -> None:
    script = {
        "bf16": TWINS["bf16"],
        "checkpointing": changed(
            SCRIPT, ("range(2)", "range(1)"), ("nn.Linear(width, 4 * width), nn.GELU()", "nn.GELU()"),
            ("nn.Linear(4 * width, width)", "nn.Linear(width, width)"),
        ),
    }[change]  # fmt: skip
    by_itself = run(script, variant=change, steps=2, listeners=EVERYTHING, card=CARD).result
    assert by_itself.variant is None
    assert by_itself.peak == by_hand(script).peak


def test_gradients_that_others_make_zero_stay_too(run) -> None:
    script = SCRIPT.replace("optimizer.zero_grad()", "model.zero_grad()") + "\n"
    script = script.replace("scheduler.step()", "scheduler.step()\n    print(model.head.weight.grad is not None)")
    ran = run(script, variant="accumulation:3", steps=1, card=CARD)
    assert ran.out == "True\nTrue\n"
    assert ran.result.completed == 1


def test_an_evaluation_is_not_changed(run) -> None:
    body = "with torch.no_grad():\n    print(model(x).dtype, torch.is_autocast_enabled('cuda'))\n"
    ran = run(SCRIPT.replace("range(18)", "range(1)") + body, variant="bf16", card=CARD)
    assert ran.out == "torch.float32 False\n"
