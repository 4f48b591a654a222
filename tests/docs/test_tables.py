"""The pages about levers, the doctor, the hardware and profiles: they name what the code has, and no more."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import hotloop
from hotloop.apps.doctor.rules import RULES
from hotloop.apps.top.advice import Advice, trouble
from hotloop.apps.top.feed import HardwareSample
from hotloop.levers import LEVERS, Lever
from hotloop.monitor.reading import Gpu, Host, Reading
from hotloop.profiling.profile_record import PARTS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EACH = pytest.mark.parametrize("lever", LEVERS, ids=[lever.name for lever in LEVERS])


def read(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


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
    page = read(lever.page)
    assert page.startswith(f"# {lever.name}\n")
    assert "| tier | cost to pull | how it is undone |" in page
    assert f"| {lever.tier} | {lever.cost} | {lever.undo} |" in page
    assert f"Tier {lever.tier}" in page  # and what that means for the numbers


@EACH
def test_the_plan_on_a_page_has_the_lever_pulled(lever: Lever) -> None:
    plans = plans_in(read(lever.page))
    assert plans
    for plan in plans:
        assert lever.pull(plan) == plan


def test_no_page_is_left_over() -> None:
    pages = {f"levers/{file.name}" for file in (DOCS / "levers").iterdir()}
    assert pages == {lever.page for lever in LEVERS} | {"levers/index.md"}


def test_the_table_of_all_levers_is_that_of_the_code() -> None:
    rows = [line for line in read("levers/index.md").splitlines() if line.startswith("| [")]
    expected = [
        f"| [{lever.name}]({Path(lever.page).name}) | {lever.tier} | {lever.cost} | {lever.what} |" for lever in LEVERS
    ]
    assert rows == expected


def test_the_table_of_rules_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| ([AB]) \|", read("doctor.md"), re.MULTILINE)
    assert rows == [(rule.name, rule.tier) for rule in RULES]


def section(page: str, title: str) -> str:
    """From a heading to the next of any level."""
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def rows(text: str) -> list[str]:
    """The first cell of each row of the tables in a text, headers and rules left out."""
    return re.findall(r"^ *\| (`.*?) \|", text, re.MULTILINE)


def test_the_table_of_advice_has_every_rule() -> None:
    source = "".join(file.read_text() for file in (ROOT / "src/hotloop/apps/top/advice").glob("*.py"))
    written = set(re.findall(r'Advice\(\s*"([a-z-]+)"', source)) | {trouble.POWER, trouble.HEAT, trouble.HARDWARE}
    assert len(written) > 10
    assert {cell.strip("`") for cell in rows(section(read("monitor.md"), "Advice"))} == written


def test_the_table_of_metrics_has_every_name() -> None:
    pytest.importorskip("prometheus_client")  # an extra
    from hotloop.apps.top.exporter import families

    reading = Reading(0.0, Host(name="kestrel"), (Gpu(0, "H200", throttled=("heat",)),))
    told = {family.name for family in families(HardwareSample(1, reading, (Advice("heat", 0, "It is hot."),)))}
    listed = [
        name for cell in rows(section(read("monitor.md"), "For programs")) for name in re.findall(r"`(\w+)`", cell)
    ]
    assert sorted(listed) == sorted(told)


def test_the_parts_of_a_step_are_those_of_a_profile() -> None:
    assert tuple(cell.strip("`") for cell in rows(section(read("profiling.md"), "What the page answers"))) == PARTS


def test_the_menu_leads_to_the_pages() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    assert all(f"- {lever.name}: {lever.page}\n" in menu for lever in LEVERS)
    for page in ("monitor.md", "profiling.md", "reports.md"):
        assert (DOCS / page).is_file()
        assert f": {page}\n" in menu
