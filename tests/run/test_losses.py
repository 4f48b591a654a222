"""The gradient of the whole batch, for the losses that people use, however they are computed in parts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop import Loop, Plan
from hotloop.errors import BadArgument, DoesNotFit

from ..thorough import THOROUGH, some
from .losses import CASES, COLUMNS, Case, cell, cut, measure, told

PAGE = Path(__file__).parents[2] / "docs/losses.md"
REFUSED = (
    r"(items at once, .* in micro-batches of 5|the gradient is not that of its micro-batches of 5|is kept above)"
    r"[\s\S]*fix: .*split"
)
pytestmark = pytest.mark.usefixtures("light_heap")
NAMES = [case.name for case in CASES]


def steps(loop: Loop, batches: Iterable[Any]) -> None:
    for batch in loop.batches(list(batches)):
        loop.step(batch)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_parts_have_the_gradient_of_the_whole_batch(case: Case) -> None:
    for column in COLUMNS if THOROUGH else COLUMNS[CASES.index(case) % 4 :: 4]:
        seen: list[str] = []
        off = None
        with told(seen):
            off = measure(case, column)
        if case.couples or case.norm:
            if column != "evaluate":  # the mean of the batches' losses, as anyone computes it
                right = off is not None and off <= (2e-2 if column == "bf16" else 1e-5)
                assert seen or right, f"{case.name}, {column}: neither refused nor warned of"
            continue
        if column in case.told_of:
            assert seen, f"{case.name}, {column}: neither refused nor warned of"
            continue
        assert not seen, f"{case.name}, {column}: {seen}"
        assert off <= (2e-2 if column == "bf16" else 1e-5), f"{case.name}, {column}: off by {off:.1e}"


COUPLED = [case for case in CASES if case.couples]


@pytest.mark.parametrize("case", some(COUPLED, COUPLED[::2]), ids=lambda case: case.name)
def test_samples_that_are_coupled_are_refused_with_both_numbers(case: Case) -> None:
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    loop = Loop(model, optimizer, objective=case.objective, device="cpu", plan=Plan("cpu", micro_batch=5))
    with pytest.raises(BadArgument, match=REFUSED) as caught:
        loop.step(case.batch())
    assert not isinstance(caught.value, DoesNotFit)
    assert all(map(torch.equal, before, model.parameters()))
    accepting = Plan("cpu", micro_batch=5, split="items")
    loop = Loop(model, optimizer, objective=case.objective, device="cpu", plan=accepting)
    loop.step(case.batch())
    assert loop.steps == 1


@pytest.mark.parametrize("case", some(COUPLED, COUPLED[1::2]), ids=lambda case: case.name)
def test_accumulated_losses_that_are_coupled_are_the_mean_of_the_batches(case: Case) -> None:
    sizes = (6, 6, 5)
    ours, theirs = case.model(), case.model()
    loop = Loop(ours, torch.optim.SGD(ours.parameters(), 0.0), objective=case.objective, device="cpu", accumulate=3)
    with pytest.warns(match="accumulate averages the losses of its batches"):
        steps(loop, cut(case.batch(), sizes))
    for size, batch in zip(sizes, cut(case.batch(), sizes), strict=True):
        (case.by_hand(theirs, batch) * size / sum(sizes)).backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_the_table_of_the_documentation_has_every_loss() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(CASES) >= 25
    for case in CASES:
        assert f"| {case.name} |" in page, "run: python tests/run/losses.py docs/losses.md"
    assert f"| loss | {' | '.join(COLUMNS)} |" in page


def test_a_row_of_the_table() -> None:
    by_name = {case.name: case for case in CASES}
    assert float(cell(by_name["masked mean by hand"], "accumulate")) < 1e-5
    assert cell(by_name["contrastive (InfoNCE)"], "micro_batch=") == "refused"
