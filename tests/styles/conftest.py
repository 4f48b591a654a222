"""What the styles share: a CPU, and runs that are short."""

import pytest


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are compared to the bit stay eager, however slow the machine is; `tests/tune` tests the rest."""
    monkeypatch.setenv("HOTLOOP_DEVICE", "cpu")
    monkeypatch.setattr("hotloop.tune.course.WORTH_A_PLAN", 60.0)
    monkeypatch.setattr("hotloop.tune.course.WORTH_ON_CPU", 10**6)
