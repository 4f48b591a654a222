"""`hotloop learn --notebook`: the learner's own copies of the notebooks and exercises, opened in JupyterLab."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from hotloop.apps.learn.exercise import exercises
from hotloop.apps.learn.learner_progress import data_folder
from hotloop.apps.learn.lesson import lesson, lessons
from hotloop.apps.learn.notebook import notebook
from hotloop.errors import HotloopError, OutputError
from hotloop.printing.text import printable
from hotloop.records.cache import make_private
from hotloop.records.files import write_whole
from hotloop.scripts.as_main import interpreter


def notebook_folder() -> Path:
    """Where a learner's notebooks are."""
    return data_folder() / "notebooks"


def copy_missing() -> None:
    """Write every notebook and exercise that is not in the learner's folder; what is there stays as it is."""
    texts = {f"{each.name}.ipynb": notebook(each) for each in lessons()}
    texts |= {each.file.name: each.file.read_text(encoding="utf-8") for each in exercises()}
    folder = notebook_folder()
    try:
        make_private(folder)
        for name, text in texts.items():
            if not (folder / name).exists():
                write_whole(folder / name, text.encode())
    except OSError as error:
        where = printable(str(folder))
        raise OutputError(
            f"the notebooks cannot be written to {where}: {error.strerror or error}",
            fix="HOTLOOP_DATA names another folder",
        ) from error


def open_notebooks(number: int | None) -> None:
    """Become JupyterLab, which shows the notebook of a lesson, or the folder; on this machine alone, with its token."""
    if find_spec("jupyterlab") is None:
        raise HotloopError("JupyterLab is not installed", fix="pip install 'hotloop[learn]'")
    shown = notebook_folder() if number is None else notebook_folder() / f"{lesson(number).name}.ipynb"
    copy_missing()
    print(f"Your notebooks are in {notebook_folder()}", flush=True)
    # No child of this process: Ctrl-C, the exit code and the terminal are JupyterLab's own.
    os.execv(sys.executable, [*interpreter("jupyterlab"), "--ServerApp.ip=127.0.0.1", str(shown)])  # noqa: S606
