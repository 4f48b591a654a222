"""What tests of captures share."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest


@pytest.fixture
def captures_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of captures where there is no GPU: steps are warmed up and looked at, and none is captured."""
    monkeypatch.setattr(
        "hotloop.step.captured.capture_stream", lambda device: SimpleNamespace(stream=None, running=nullcontext)
    )
