"""What tests of the monitor share: a fake NVML, and a clock that stands still until it is told."""

import pytest

from .fakes import Clock, FakeNvml


@pytest.fixture
def fake_nvml() -> FakeNvml:
    return FakeNvml()


@pytest.fixture
def clock() -> Clock:
    return Clock()
