"""The planted bugs: each has its line in the source, and tests that are there."""

import pytest

from .planted import BUGS, ROOT, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_it_can_be_planted(bug: Bug) -> None:
    source = (ROOT / "src" / "hotloop" / bug.file).read_text(encoding="utf-8")
    assert source.count(bug.right) == 1, "its line has moved: plant it where the line went"
    assert bug.wrong != bug.right
    for test in bug.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in (ROOT / file).read_text(encoding="utf-8")
