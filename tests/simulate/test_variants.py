"""Changes made to a running script take what they take in a script in which a person wrote them."""

import pytest

from hotloop.simulate.cards import card
from hotloop.simulate.study import EVERYTHING

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


def changed(*pairs: tuple[str, str]) -> str:
    text = SCRIPT
    for before, after in pairs:
        assert before in text
        text = text.replace(before, after)
    return text


LOSS = "loss = criterion(model(x), y)"
TWINS = {
    "bf16": changed((LOSS, f"with torch.autocast('cuda', dtype=torch.bfloat16):\n        {LOSS}")),
    "fp16": changed((LOSS, f"with torch.autocast('cuda', dtype=torch.float16):\n        {LOSS}")),
    "checkpointing": changed(("x = block(x)", "x = checkpoint(block, x, use_reentrant=False)")),
    "accumulation:2": changed(
        ("batch = 512", "batch = 256"),
        ("optimizer.zero_grad()", "if number % 2 == 0: optimizer.zero_grad()"),
        ("    optimizer.step()", "    if number % 2: optimizer.step()"),
    ),
}


@pytest.fixture(scope="module")
def as_it_is(simulator, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("plain") / "train.py"
    path.write_text(SCRIPT)
    return simulator.run(path, [], CARD, steps=2, listeners=EVERYTHING)


@pytest.mark.parametrize("change", TWINS)
def test_a_change_takes_what_it_takes_where_a_person_wrote_it(change: str, run, as_it_is) -> None:
    batch = 256 if change.startswith("accumulation") else None
    options = {"steps": 2, "listeners": EVERYTHING, "card": CARD}
    by_itself = run(SCRIPT, variant=change, batch=batch, **options).result
    by_hand = run(TWINS[change], **options).result
    assert by_itself.variant == change
    assert (by_itself.error, by_itself.completed) == (None, 2)
    assert (by_itself.peak, by_itself.categories) == (by_hand.peak, by_hand.categories)
    assert by_itself.step_ms == by_hand.step_ms
    assert by_itself.peak.allocated < 0.95 * as_it_is.peak.allocated


@pytest.mark.parametrize("change", ["bf16", "checkpointing"])
def test_a_script_that_has_nothing_to_change_is_as_it_was(change: str, run) -> None:
    script = {
        "bf16": TWINS["bf16"],
        "checkpointing": changed(("range(2)", "range(1)"), ("nn.Linear(width, 4 * width), nn.GELU()", "nn.GELU()"),
                                 ("nn.Linear(4 * width, width)", "nn.Linear(width, width)")),
    }[change]  # fmt: skip
    options = {"steps": 2, "listeners": EVERYTHING, "card": CARD}
    by_itself = run(script, variant=change, **options).result
    assert by_itself.variant is None
    assert by_itself.peak == run(script, **options).result.peak


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
