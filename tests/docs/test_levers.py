"""The pages of the levers: one for each, and each says what the code says."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import hotloop
from hotloop.levers import LEVERS, Lever

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EACH = pytest.mark.parametrize("lever", LEVERS, ids=[lever.name for lever in LEVERS])


def plans_in(page: str) -> list[hotloop.Plan]:
    """Every `hotloop.Plan(…)` in the code of a page, made."""
    made = []
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for call in ast.walk(ast.parse(block)):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "hotloop.Plan":
                options: dict[str, Any] = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
                made.append(hotloop.Plan(*map(ast.literal_eval, call.args), **options))
    return made


@EACH
def test_a_page_for_every_lever_with_its_tier_its_cost_and_how_it_is_undone(lever: Lever) -> None:
    page = (DOCS / lever.page).read_text()
    assert page.startswith(f"# {lever.name}\n")
    assert "| tier | cost to pull | how it is undone |" in page
    assert f"| {lever.tier} | {lever.cost} | {lever.undo} |" in page
    assert f"Tier {lever.tier}" in page  # and what that means for the numbers


@EACH
def test_the_plan_on_a_page_has_the_lever_pulled(lever: Lever) -> None:
    plans = plans_in((DOCS / lever.page).read_text())
    assert plans
    for plan in plans:
        assert lever.pull(plan) == plan


def test_no_page_is_left_over() -> None:
    pages = {f"levers/{file.name}" for file in (DOCS / "levers").iterdir()}
    assert pages == {lever.page for lever in LEVERS} | {"levers/index.md"}


def test_the_table_of_all_levers_is_that_of_the_code() -> None:
    rows = [line for line in (DOCS / "levers/index.md").read_text().splitlines() if line.startswith("| [")]
    expected = [
        f"| [{lever.name}]({Path(lever.page).name}) | {lever.tier} | {lever.cost} | {lever.what} |" for lever in LEVERS
    ]
    assert rows == expected


@EACH
def test_the_menu_leads_to_every_page(lever: Lever) -> None:
    assert f"- {lever.name}: {lever.page}\n" in (ROOT / "mkdocs.yml").read_text()
