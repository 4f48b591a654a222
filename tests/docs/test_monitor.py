"""The pages about the hardware and about profiles: they name what the code has, and no more."""

import re
from pathlib import Path

import pytest

from hotloop.apps.top.advice import Advice, trouble
from hotloop.apps.top.feed import HardwareSample
from hotloop.apps.top.view_options import SORTS
from hotloop.monitor.reading import Gpu, Host, Reading
from hotloop.profiling.profile_record import PARTS

ROOT = Path(__file__).parents[2]
MONITOR = (ROOT / "docs/monitor.md").read_text(encoding="utf-8")
PROFILING = (ROOT / "docs/profiling.md").read_text(encoding="utf-8")


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
    assert {cell.strip("`") for cell in rows(section(MONITOR, "Advice"))} == written


def test_the_table_of_metrics_has_every_name() -> None:
    pytest.importorskip("prometheus_client")  # an extra
    from hotloop.apps.top.exporter import families

    reading = Reading(0.0, Host(name="kestrel"), (Gpu(0, "H200", throttled=("heat",)),))
    told = {family.name for family in families(HardwareSample(1, reading, (Advice("heat", 0, "It is hot."),)))}
    listed = [name for cell in rows(section(MONITOR, "For programs")) for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(told)


def test_the_keys_that_sort_are_those_of_the_view() -> None:
    assert " ".join(f"`{key}`" for key in SORTS) + f" | sort processes by {', '.join(SORTS.values())} |" in MONITOR


def test_the_parts_of_a_step_are_those_of_a_profile() -> None:
    assert tuple(cell.strip("`") for cell in rows(section(PROFILING, "What the page answers"))) == PARTS


def test_the_menu_leads_to_the_pages() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    for page in ("monitor.md", "profiling.md", "reports.md"):
        assert (ROOT / "docs" / page).is_file()
        assert f": {page}\n" in menu
