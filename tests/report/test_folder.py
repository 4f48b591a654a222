"""The folder of a run: all of it or nothing, and errors that help."""

import json
import math
import os
import re
from pathlib import Path

import pytest

from hotloop.errors import OutputError
from hotloop.records.files import finite
from hotloop.report.runs import new_run

AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_written_is_there_under_its_name(here: Path) -> None:
    with new_run(Path("first")) as run:
        run.write("a.txt", "é")
        run.write("b.bin", b"\x00")
        run.write("c.txt", os.fsdecode(b"p\xff.py"))
    assert everything(here) == ["first", "first/a.txt", "first/b.bin", "first/c.txt"]
    assert (here / "first/a.txt").read_text(encoding="utf-8") == "é"
    assert (here / "first/c.txt").read_text() == r"p\udcff.py", "what is no text is written as its escape"


def test_two_runs_in_the_same_second_get_two_folders(here: Path) -> None:
    paths = set()
    for _ in range(3):
        with new_run() as run:
            run.write("a.txt", "a")
        paths.add(run.path)
        assert re.match(r"runs/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", str(run.path))
    assert len(paths) == 3
    assert len(list((here / "runs").iterdir())) == 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("out", [Path("deep/er/run"), Path("empty")])
def test_after_an_error_or_ctrl_c_nothing_is_left(here: Path, out: Path, error: type[BaseException]) -> None:
    (here / "empty").mkdir()
    with pytest.raises(error), new_run(out) as run:  # noqa: PT012  # the block is what is tested
        run.write("a.txt", "a")
        raise error
    assert everything(here) == ["empty"]


def test_an_empty_folder_is_filled(here: Path) -> None:
    (here / "empty").mkdir()
    with new_run(here / "empty") as run:
        run.write("a.txt", "a")
    assert everything(here) == ["empty", "empty/a.txt"]


def test_what_is_there_is_never_overwritten(here: Path) -> None:
    (here / "full").mkdir()
    (here / "full/mine.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"full is not empty(.|\n)*fix: choose a new name"), new_run(Path("full")):
        pytest.fail("the work must not begin")
    assert everything(here) == ["full", "full/mine.txt"]


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("file", "no folder"),
        ("file/run", "Not a directory"),
        ("file/deep/er/run", "Not a directory"),
        ("n" * 300, "File name too long"),
        ("dangling", "no folder"),
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
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    why = r"cannot write first/a.txt: No space left"
    with (
        pytest.raises(OutputError, match=why) as caught,
        new_run(Path("first")) as run,
    ):
        run.write("a.txt", "a")
    assert "enough space" in str(caught.value.fix)
    assert everything(here) == []


def test_json_is_strict(here: Path) -> None:
    with new_run(Path("first")) as run:
        run.write_json("a.json", {"loss": math.nan, "curve": ((1, math.inf), (2, 0.5)), "none": None})
    assert json.loads((here / "first/a.json").read_text()) == {
        "loss": None,
        "curve": [[1, None], [2, 0.5]],
        "none": None,
    }
    assert finite({"a": [1, 2.5, True, "x"]}) == {"a": [1, 2.5, True, "x"]}
