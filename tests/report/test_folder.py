"""The folder of a run: all of it or nothing, and errors that help."""

import json
import math
import os
import re
from pathlib import Path

import pytest

from hotloop.errors import OutputError
from hotloop.files.whole import finite
from hotloop.report.run_folder import new_run

AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_folder_appears_only_when_all_is_written(here: Path) -> None:
    with new_run(Path("first")) as run:
        run.write("a.txt", "é")
        run.write("b.bin", b"\x00")
        assert not run.path.exists()
    assert everything(here) == ["first", "first/a.txt", "first/b.bin"]
    assert (here / "first/a.txt").read_text(encoding="utf-8") == "é"


def test_what_is_no_text_is_written_as_its_escape(here: Path) -> None:
    with new_run(Path("first")) as run:
        run.write("a.txt", os.fsdecode(b"p\xff.py"))
    assert (here / "first/a.txt").read_text() == r"p\udcff.py"


def test_by_default_it_is_named_by_the_time(here: Path) -> None:
    with new_run() as run:
        run.write("a.txt", "a")
    assert re.fullmatch(r"runs/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", str(run.path))
    assert (here / run.path / "a.txt").exists()


def test_two_runs_in_the_same_second_get_two_folders(here: Path) -> None:
    paths = set()
    for _ in range(3):
        with new_run() as run:
            run.write("a.txt", "a")
        paths.add(run.path)
    assert len(paths) == 3
    assert len(list((here / "runs").iterdir())) == 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("out", [None, Path("deep/er/run"), Path("empty")])
def test_after_an_error_or_ctrl_c_nothing_is_left(here: Path, out: Path | None, error: type[BaseException]) -> None:
    (here / "empty").mkdir()
    with pytest.raises(error), new_run(out) as run:  # noqa: PT012  # the block is what is tested
        run.write("a.txt", "a")
        raise error
    assert everything(here) == ["empty"]


def test_a_parent_that_something_else_used_meanwhile_stays(here: Path) -> None:
    with pytest.raises(ValueError, match="boom"), new_run(Path("parent/run")):  # noqa: PT012
        (here / "parent/other.txt").write_text("mine")
        raise ValueError("boom")
    assert everything(here) == ["parent", "parent/other.txt"]


def test_an_empty_folder_is_filled_and_stays_the_same_folder(here: Path) -> None:
    target = here / "empty"
    target.mkdir(mode=0o700)
    before = target.stat()
    with new_run(target) as run:
        run.write("a.txt", "a")
    assert (target.stat().st_ino, target.stat().st_mode) == (before.st_ino, before.st_mode)
    assert everything(here) == ["empty", "empty/a.txt"]


def test_the_current_folder_can_be_filled(here: Path) -> None:
    with new_run(Path()) as run:
        run.write("a.txt", "a")
    assert everything(here) == ["a.txt"]
    assert Path("a.txt").exists()


@pytest.mark.skipif(os.name == "nt", reason="permission bits are those of POSIX")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o077, 0o700), (0o002, 0o775)])
def test_the_folder_follows_the_umask(here: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with new_run(Path("first")) as run:
            run.write("a.txt", "a")
    finally:
        os.umask(before)
    assert (here / "first").stat().st_mode & 0o777 == mode


def test_what_is_there_is_never_overwritten(here: Path) -> None:
    (here / "full").mkdir()
    (here / "full/mine.txt").write_text("mine")
    with pytest.raises(OutputError, match="full is not empty\n  fix: choose a new name"), new_run(Path("full")):
        pytest.fail("the work must not begin")
    assert everything(here) == ["full", "full/mine.txt"]


def test_a_folder_that_is_filled_during_the_run_is_not_overwritten(here: Path) -> None:
    with pytest.raises(OutputError, match="cannot write first"), new_run(Path("first")) as run:  # noqa: PT012
        run.write("a.txt", "a")
        (here / "first").mkdir()
        (here / "first/mine.txt").write_text("mine")
    assert everything(here) == ["first", "first/mine.txt"]


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("file", "a file has that name"),
        ("file/run", "Not a directory"),
        ("file/deep/er/run", "Not a directory"),
        ("n" * 300, "File name too long"),
        ("dangling", "a link to nowhere"),
        ("/proc/1/run", "No such file|Permission|not permitted"),
        ("nul\0", "null"),
    ],
)
def test_a_place_that_cannot_be_written_is_told_before_the_work_begins(here: Path, out: str, reason: str) -> None:
    (here / "file").write_text("mine")
    (here / "dangling").symlink_to("nowhere")
    with pytest.raises(OutputError, match=reason) as caught, new_run(Path(out)):
        pytest.fail("the work must not begin")
    assert caught.value.fix
    assert out[:8].replace("\0", "") in str(caught.value)
    assert everything(here) == ["dangling", "file"]


@pytest.mark.skipif(AS_ROOT, reason="permission bits do not bind root")
def test_a_parent_without_permission_is_named(here: Path) -> None:
    (here / "locked").mkdir(mode=0o500)
    with pytest.raises(OutputError, match="cannot write locked/run: Permission denied"), new_run(Path("locked/run")):
        pytest.fail("the work must not begin")


def test_a_disk_that_fails_is_named_with_the_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    why = r"cannot write first/a.txt: No space left"
    with (
        pytest.raises(OutputError, match=why) as caught,
        new_run(Path("first")) as run,
    ):
        run.write("a.txt", "a")
    assert "free some space" in str(caught.value.fix)
    assert everything(here) == []


def test_json_is_strict(here: Path) -> None:
    with new_run(Path("first")) as run:
        run.write_json("a.json", {"loss": math.nan, "curve": ((1, math.inf), (2, 0.5)), "none": None})
    assert json.loads((here / "first/a.json").read_text()) == {
        "loss": None,
        "curve": [[1, None], [2, 0.5]],
        "none": None,
    }


def test_numbers_that_are_finite_stay() -> None:
    assert finite({"a": [1, 2.5, True, "x"]}) == {"a": [1, 2.5, True, "x"]}
