"""What the tests of the zoo share. Its scripts run in processes of their own, and are no tests."""

from collections.abc import Iterator

import pytest
import torch

collect_ignore = ["killing.py", "on_cuda.py"]


@pytest.fixture
def nothing_rounds() -> Iterator[None]:
    """Levers that change the rounding are left alone."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
