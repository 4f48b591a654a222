"""What a learner has done, kept in their data folder."""

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotloop.records.cache import make_private
from hotloop.records.files import write_json


def data_folder() -> Path:
    """HOTLOOP_DATA, or `hotloop` in the folder for data of programs."""
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(os.environ.get("HOTLOOP_DATA") or Path(home, "hotloop")).expanduser()


def progress_file() -> Path:
    """Where progress is kept."""
    return data_folder() / "learn.json"


@dataclass
class LearnerProgress:
    """Lessons opened and done, exercises checked, questions answered."""

    lessons: dict[str, str] = field(default_factory=dict)  # number → opened or done
    exercises: dict[str, dict[str, Any]] = field(default_factory=dict)  # number → passed, right, of
    quiz: dict[str, bool] = field(default_factory=dict)  # question → whether the last answer was right

    @classmethod
    def load(cls) -> "LearnerProgress":
        """What was kept; a file that cannot be read is put aside, and a new one begins."""
        file = progress_file()
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            kept = {name: data[name] for name in ("lessons", "exercises", "quiz")}
            if not all(isinstance(each, dict) for each in kept.values()):
                raise TypeError
        except OSError:  # it is not there, or not to be read
            return cls()
        except (ValueError, KeyError, TypeError):
            with suppress(OSError):
                file.replace(file.with_suffix(".broken"))
            return cls()
        return cls(**kept)

    def save(self) -> None:
        """Keep it, whole or not at all; where that is not possible, learning goes on without."""
        data = {"lessons": self.lessons, "exercises": self.exercises, "quiz": self.quiz}
        try:
            make_private(progress_file().parent)
            write_json(progress_file(), data, mode=0o600)
        except OSError as error:
            why = str(error).splitlines()[0]
            print(f"hotloop: progress is not kept: {why} (HOTLOOP_DATA names another folder)", file=sys.stderr)

    def opened(self, lesson: int) -> None:
        self.lessons.setdefault(str(lesson), "opened")
        self.save()

    def done(self, lesson: int) -> None:
        self.lessons[str(lesson)] = "done"
        self.save()

    def checked(self, exercise: int, right: int, of: int) -> None:
        """An exercise was checked; once it has passed, that stays."""
        before = self.exercises.get(str(exercise), {})
        passed = right == of or bool(before.get("passed"))
        self.exercises[str(exercise)] = {"passed": passed, "right": right, "of": of}
        self.save()

    def answered(self, question: str, right: bool) -> None:
        self.quiz[question] = right
        self.save()
