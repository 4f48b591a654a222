"""Files that appear whole or not at all."""

import os
from pathlib import Path

import pytest

from hotloop.records.files import write_whole


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o000, 0o666)])
def test_a_file_has_the_mode_that_the_umask_leaves_it(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "new", b"data")
        write_whole(tmp_path / "secret", b"data", mode=0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == mode
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_the_umask_of_other_threads_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(_: int) -> int:
        raise AssertionError("for a moment, every thread made files that anyone can write")

    monkeypatch.setattr(os, "umask", changed)
    write_whole(tmp_path / "new", b"data")
    assert (tmp_path / "new").read_bytes() == b"data"
