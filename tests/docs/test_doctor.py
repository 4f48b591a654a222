"""The page about the doctor has the rules that there are."""

import re
from pathlib import Path

from hotloop.apps.doctor.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def test_the_table_of_rules_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| ([AB]) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(rule.name, rule.tier) for rule in RULES]
