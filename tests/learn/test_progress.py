"""Progress: kept between runs, whole or not at all, and never a reason to fail."""

import stat
from pathlib import Path

import pytest

from hotloop.apps.learn.learner_progress import LearnerProgress, progress_file


def test_what_was_done_is_there_again_and_what_has_passed_stays_so(data_folder: Path) -> None:
    progress = LearnerProgress.load()
    progress.opened(3)
    progress.done(3)
    progress.opened(3)  # again, which takes nothing away
    progress.checked(3, 2, 4)
    progress.answered("portable", True)
    again = LearnerProgress.load()
    assert (again.lessons, again.quiz) == ({"3": "done"}, {"portable": True})
    assert again.exercises == {"3": {"passed": False, "right": 2, "of": 4}}
    assert progress_file().parent == data_folder
    assert stat.S_IMODE(progress_file().stat().st_mode) == 0o600
    again.checked(3, 4, 4)
    again.checked(3, 1, 4)
    assert LearnerProgress.load().exercises["3"]["passed"] is True


@pytest.mark.parametrize("text", ["", "[]", "{", '{"lessons": 3, "exercises": {}, "quiz": {}}', "\udcff"])
def test_a_file_that_cannot_be_read_is_put_aside(text: str) -> None:
    progress_file().parent.mkdir()
    progress_file().write_text(text, encoding="utf-8", errors="surrogateescape")
    assert LearnerProgress.load() == LearnerProgress()
    assert progress_file().with_suffix(".broken").exists()
    LearnerProgress.load().opened(1)
    assert LearnerProgress.load().lessons == {"1": "opened"}


def test_the_folder_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HOTLOOP_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    assert progress_file() == tmp_path / "share" / "hotloop" / "learn.json"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert progress_file() == Path.home() / ".local" / "share" / "hotloop" / "learn.json"


def test_where_nothing_can_be_written_learning_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HOTLOOP_DATA", str(tmp_path / "file" / "data"))
    LearnerProgress.load().opened(1)
    assert "progress is not kept" in capsys.readouterr().err
    assert LearnerProgress.load() == LearnerProgress()
