"""What a benchmark says of the machine it ran on."""

import pytest

from harness import about

from .racing import CPU


def test_the_hardware_makes_a_name_for_a_folder() -> None:
    words = about.hardware([CPU])
    assert "thread" in words
    assert about.slug(words).replace("-", "").isalnum()
    assert about.slug("///") == "unknown"


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(about.shutil, "which", lambda _: None)
    assert about.commit() is None
