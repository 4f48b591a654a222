"""The benchmark of the pages "coming from" reads them."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def coming_from(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("coming_from")


@pytest.mark.parametrize("page", ["lightning", "accelerate", "trainer"])
def test_the_scripts_of_a_page_are_found_and_made_larger(page: str, coming_from: Any) -> None:
    shared, other, own = coming_from.scripts_of(page)
    for script in (shared, other, own):
        ast.parse(script)
    assert "16448" in shared
    assert "hotloop" in own
    assert "hotloop" not in other
    assert "shuffle" not in shared + own
