"""`hotloop learn --notebook` and `check` in a cell: what is copied, what stays, and how JupyterLab is called."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotloop.apps.learn import check
from hotloop.apps.learn.checking import Result
from hotloop.apps.learn.exercise import exercise, exercises
from hotloop.apps.learn.judging import CheckVerdict
from hotloop.apps.learn.learner_progress import LearnerProgress
from hotloop.apps.learn.lesson import lessons
from hotloop.cli import app
from hotloop.errors import OutputError


@pytest.fixture
def jupyterlab(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """JupyterLab is here, and the commands are kept that would run it."""
    called: list[list[str]] = []
    monkeypatch.setattr("hotloop.apps.learn.jupyterlab.find_spec", lambda _: object())
    monkeypatch.setattr(os, "execv", lambda _, command: called.append(command))
    return called


def learn(*words: str) -> Any:
    return CliRunner().invoke(app, ["learn", *words])


def test_notebooks_and_exercises_are_copied_and_what_a_learner_changed_stays(
    jupyterlab: list[list[str]], data_folder: Path
) -> None:
    assert learn("--notebook").exit_code == 0
    folder = data_folder / "notebooks"
    names = {f"{each.name}.ipynb" for each in lessons()} | {each.file.name for each in exercises()}
    assert {file.name for file in folder.iterdir()} == names
    for each in lessons():
        cells = json.loads((folder / f"{each.name}.ipynb").read_text())["cells"]
        assert not any(cell.get("outputs") for cell in cells)
        last = "".join(cells[-1]["source"])
        assert exercise(each.number).file.name in last
        assert f"check({each.number})" in last
    book, script = folder / "03-golden-rule.ipynb", folder / "03_golden_rule.py"
    book.write_text("mine")
    script.write_text("mine too")
    (folder / "04-model.ipynb").unlink()
    assert learn("--notebook", "3").exit_code == 0
    assert (book.read_text(), script.read_text()) == ("mine", "mine too")
    assert (folder / "04-model.ipynb").exists()
    here = "--ServerApp.ip=127.0.0.1"  # on this machine alone
    assert [command[-2:] for command in jupyterlab] == [[here, str(folder)], [here, str(book)]]
    assert LearnerProgress.load().lessons == {"3": "opened"}


@pytest.mark.skipif(find_spec("jupyterlab") is not None, reason="JupyterLab is here")
def test_without_jupyterlab_the_error_says_what_to_install(data_folder: Path) -> None:
    told = str(learn("--notebook").exception)
    assert told == "JupyterLab is not installed\n  fix: pip install 'hotloop[learn]'"
    assert not data_folder.exists()


def answers(port: int) -> bool:
    with socket.socket() as asking:
        return not asking.connect_ex(("127.0.0.1", port))


@pytest.mark.skipif(find_spec("jupyterlab") is None, reason="needs JupyterLab (`pip install 'hotloop[learn]'`)")
def test_jupyterlab_shows_the_notebook_here_to_who_has_its_token(
    tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {"ServerApp": {"allow_root": True, "open_browser": False, "port": port, "ip": "0.0.0.0"}}  # noqa: S104
    (tmp_path / "jupyter_server_config.json").write_text(json.dumps(settings))
    for name in ("CONFIG", "DATA", "RUNTIME"):
        monkeypatch.setenv(f"JUPYTER_{name}_DIR", str(tmp_path))
    command = [sys.executable, "-m", "hotloop", "learn", "--notebook", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout is not None
        try:
            address, token = next(
                found.groups()
                for line in server.stdout
                if (found := re.search(r"(http://\S+?)/lab\S*\?token=(\S+)", line))
            )
            assert address == f"http://127.0.0.1:{port}"
            contents = f"{address}/api/contents/03-golden-rule.ipynb"
            while not answers(port):  # it says so before it listens
                assert server.poll() is None
                time.sleep(0.1)
            with urllib.request.urlopen(f"{contents}?token={token}", timeout=60) as answer:  # noqa: S310  # of this machine
                assert json.load(answer)["type"] == "notebook"
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(contents, timeout=60)  # noqa: S310  # the same
        finally:
            server.terminate()


def test_a_folder_that_cannot_be_written_is_told(
    jupyterlab: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HOTLOOP_DATA", str(tmp_path / "file" / "data"))
    failed = learn("--notebook").exception
    assert isinstance(failed, OutputError)
    assert "HOTLOOP_DATA" in str(failed)
    assert not jupyterlab


@pytest.mark.parametrize("file", [None, "mine.py"])
def test_check_in_a_cell_shows_the_verdicts_keeps_them_and_returns_the_result(
    file: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def checked(_: Any, file: Path, **_limits: float) -> Result:
        verdicts = (CheckVerdict("it runs", True), CheckVerdict("it is fast", False, f"{file} is slow"))
        return Result(3, verdicts, "cpu", "")

    monkeypatch.setattr("hotloop.apps.learn.checking.check", checked)
    result = check(3, file)
    said = capsys.readouterr().out
    assert "right  it runs" in said
    assert f"hint: {file or '03_golden_rule.py'} is slow" in said
    assert (repr(result), result.passed) == ("exercise 3: 1 of 2 right", False)
    assert "exercise 3: 1 of 2 right" in result._repr_html_()
    assert LearnerProgress.load().exercises["3"]["right"] == 1
