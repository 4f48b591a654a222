"""What the tests of the zoo share. Its scripts run in processes of their own, and are no tests."""

import pytest


@pytest.fixture(autouse=True)
def _no_commit_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is two processes of git for each run that saves."""
    monkeypatch.setattr("hotloop.run.run_files._git", lambda folder: None)
