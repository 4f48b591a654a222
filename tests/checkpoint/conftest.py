"""What the tests of checkpoints share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def as_nobody(tmp_path: Path) -> Iterator[None]:
    """Without the right to read or write the folder of the test, also where the tests are run by root."""
    before = os.geteuid()
    tmp_path.chmod(0)
    if before == 0:
        os.seteuid(65534)
    yield
    if before == 0:
        os.seteuid(before)
    tmp_path.chmod(0o700)
