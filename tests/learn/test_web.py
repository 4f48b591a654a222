"""`hotloop learn --web`: who may run code, what runs, within which limits, and what is kept of it."""

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from hotloop.apps.learn import quiz, server, web
from hotloop.apps.learn.checking import Result
from hotloop.apps.learn.exercise import Exercise, exercise
from hotloop.apps.learn.judging import CheckVerdict
from hotloop.apps.learn.learner_progress import LearnerProgress
from hotloop.apps.learn.lesson import lessons
from hotloop.errors import HotloopError

from ..processes import gone
from .classroom import Visitor, served

EVIL = "http://example.org"
PAGES = ["/", "/lesson/3", "/lesson/12", "/quiz", "/quiz?lesson=3"]
RUN = {"lesson": 3, "step": 1, "code": "print('ran')"}
POSTS = ["open", "run", "stop", "save", "check", "solution", "answer"]


@pytest.fixture
def visitor() -> Iterator[Visitor]:
    """A person's browser, with the page open."""
    with served() as address:
        yield Visitor(address).enter()


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("code was run")

    monkeypatch.setattr(server.StepProcess, "run", refuse)
    monkeypatch.setattr(server.StepProcess, "start", refuse)
    monkeypatch.setattr(server, "check", refuse)


# Who may ask.


def test_without_the_token_there_is_nothing(visitor: Visitor, nothing_runs: None) -> None:
    stranger = Visitor(visitor.address)
    for path in [*PAGES, "/learn.js", "/?token=wrong", "/nothing"]:
        answer = stranger.send("GET", path)
        assert (answer.status, "Set-Cookie" in answer.headers) == (401, False)
    for name in POSTS:
        assert stranger.post(name, RUN).status == 401
        assert stranger.post(name, RUN, Authorization="Bearer wrong").status == 401
        assert stranger.post(name, RUN, Cookie=visitor.cookie + "x").status == 401


def test_the_token_becomes_a_cookie_that_scripts_cannot_read(visitor: Visitor) -> None:
    came = Visitor(visitor.address).send("GET", visitor.address.removeprefix(visitor.origin))
    assert (came.status, came.headers["Location"]) == (303, "/")
    cookie, *settings = came.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Lax", "Path=/"} == set(settings)
    token = visitor.address.partition("token=")[2]
    assert len(token) >= 32
    assert token not in cookie


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1.nip.io:8081", "10.0.0.1", "localhost.example.org", ""])
def test_a_name_that_was_made_to_point_here_is_refused(visitor: Visitor, nothing_runs: None, host: str) -> None:
    assert visitor.send("GET", "/", Host=host or " ").status in {400, 403}
    for name in POSTS:
        answer = visitor.post(name, RUN, Host=host or " ", Origin=f"http://{host}")
        assert answer.status in {400, 403}


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": ""},  # not even a program with the token
        {"Origin": EVIL},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},  # another server of this machine, to which browsers send the cookie as well
        {"Origin": "https://{netloc}"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"},
    ],
    ids=str,
)
def test_no_other_page_can_have_something_done(
    visitor: Visitor, nothing_runs: None, headers: dict[str, str], data_folder: Path
) -> None:
    token = visitor.address.partition("token=")[2]
    sent = {name: value.format(netloc=visitor.netloc) for name, value in headers.items()}
    for name in POSTS:
        assert visitor.post(name, RUN, **sent).status == 403
        assert visitor.post(name, RUN, **sent, Authorization=f"Bearer {token}").status == 403
    assert not data_folder.exists()


def test_what_a_form_can_send_is_not_read(visitor: Visitor, nothing_runs: None) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"):
        for name in POSTS:
            assert visitor.post(name, RUN, Content_Type=kind).status == 415


def test_only_a_post_does_something(visitor: Visitor, nothing_runs: None, data_folder: Path) -> None:
    for name in POSTS:
        for method in ("GET", "PUT", "DELETE", "HEAD", "OPTIONS"):
            assert visitor.send(method, f"/api/{name}", Origin=visitor.origin).status == 405
    for path in PAGES:
        assert visitor.send("GET", path).status == 200
    assert not data_folder.exists()


def test_a_link_from_elsewhere_shows_the_page_and_frames_do_not(visitor: Visitor) -> None:
    followed = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert visitor.send("GET", "/", **followed, Sec_Fetch_Dest="document").status == 200
    assert visitor.send("GET", "/", **followed, Sec_Fetch_Dest="iframe").status == 403


# What is shown.


class Links(HTMLParser):
    """What a page asks for, and its inline scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.found += [str(named[each]) for each in ("src", "href", "action") if named.get(each)]
        self.inline += [name for name in named if name.startswith("on") or name == "style"]
        if tag in {"style", "script"} and "src" not in named:
            self.inline.append(tag)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_asks_for_nothing_from_elsewhere_and_says_whose_rights_it_uses(visitor: Visitor, path: str) -> None:
    page = visitor.send("GET", path)
    assert (page.status, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "with your rights" in page.text
    links = Links(page.text)
    assert links.inline == []
    assert all(link.startswith(("/", "#")) for link in links.found)
    for link in {link for link in links.found if link.startswith("/")}:
        assert visitor.send("GET", link).status == 200, link
    rules = page.headers["Content-Security-Policy"]
    for rule in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "form-action 'none'"):
        assert rule in rules
    assert "unsafe" not in rules
    assert page.headers["X-Content-Type-Options"] == "nosniff"


def test_every_lesson_has_a_page_with_its_steps_and_its_exercise(visitor: Visitor) -> None:
    for each in lessons():
        page = visitor.send("GET", f"/lesson/{each.number}").text
        assert page.count('class="cell"') == sum(bool(step.code) for step in each.steps)
        assert f"Your version of {exercise(each.number).file.name}" in page
    for path in ("/lesson/0", "/lesson/17", "/lesson/x", "/lesson/99999999999", "/quiz?lesson=99"):
        assert visitor.send("GET", path).status == 404


def test_what_a_learner_wrote_stays_text(visitor: Visitor, data_folder: Path) -> None:
    naughty = "</textarea><script>alert(1)</script>\n'\"&<b>"
    assert visitor.post("save", {"lesson": 3, "text": naughty}).status == 200
    page = visitor.send("GET", "/lesson/3").text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    kept = data_folder / "exercises" / "03_golden_rule.py"
    assert kept.read_text() == naughty
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("path", "data", "words"),
    [
        ("open", {"lesson": 99}, "there is no lesson 99"),
        ("open", {"lesson": "3"}, "there is no lesson"),
        ("open", [3], "no JSON object"),
        ("run", {"lesson": 3, "step": 99, "code": ""}, "has no step 99"),
        ("run", {"lesson": 3, "step": [1], "code": ""}, "has no step"),
        ("run", {"lesson": 3, "step": 1}, "there is no code"),
        ("save", {"lesson": 3, "text": "x" * 200_000}, "more than 100,000 characters"),
        ("answer", {"question": "none", "given": "a"}, "there is no question 'none'"),
    ],
)
def test_requests_that_mean_nothing_are_told_so(
    visitor: Visitor, nothing_runs: None, path: str, data: Any, words: str
) -> None:
    answer = visitor.post(path, data)
    assert answer.status == 400
    assert words in answer.data["error"]
    assert answer.data["fix"]


# What runs.


def run(visitor: Visitor, step: int, code: str, number: int = 3) -> tuple[str, dict[str, Any]]:
    *output, last = visitor.post("run", {"lesson": number, "step": step, "code": code}).lines
    return "".join(line["output"] for line in output), last


@pytest.mark.skipif(sys.platform != "linux", reason="its processes are forks, which are tried on Linux alone")
def test_steps_know_what_earlier_ones_made_and_the_last_one_makes_the_lesson_done(
    visitor: Visitor, forked_children: None
) -> None:
    assert visitor.post("open", {"lesson": 3}).data == {"ran": [], "busy": False}
    assert LearnerProgress.load().lessons == {"3": "opened"}
    output, last = run(visitor, 1, "x = 20\nprint('é')\nx + 1")
    assert output == "é\n21\n"
    assert (last["end"]["error"], last["ran"], last["done"]) == (None, [1], False)
    output, last = run(visitor, 2, "import subprocess\nprint(x)\nsubprocess.run(['echo', 'of a child'])\nx / 0")
    assert re.match(r"20\nof a child\nTraceback [^$]*line 4[^$]*ZeroDivisionError", output)
    assert last["end"]["error"] == "ZeroDivisionError"
    assert run(visitor, 2, "input('who? ')")[1]["end"]["error"] == "EOFError"
    output, last = run(visitor, 2, "import sys\nsys.exit(1)")
    assert "sys.exit()" in output
    assert visitor.post("open", {"lesson": 3}).data["ran"] == [1, 2]
    for step in range(3, 9):
        assert LearnerProgress.load().lessons == {"3": "opened"}
        _, last = run(visitor, step, "pass")
    assert last["done"]
    assert LearnerProgress.load().lessons == {"3": "done"}


@pytest.mark.skipif(sys.platform != "linux", reason="its processes are forks, which are tried on Linux alone")
def test_a_step_without_an_end_is_ended_and_one_that_is_stopped_too(
    forked_children: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = partial(server.StepProcess, limit=1.0)
    small = partial(server.StepProcess, memory=900 << 20)
    monkeypatch.setattr(server, "StepProcess", lambda number: (strict if number == 3 else small)(number))
    with served() as address:
        visitor = Visitor(address).enter()
        assert run(visitor, 1, "x = 1")[1]["ran"] == [1]
        _, last = run(visitor, 2, "while True: pass")
        assert "still running after 1.00 s" in last["end"]["ended"]
        assert last["ran"] == []
        output, _ = run(visitor, 2, "print(x)")  # a new process: its variables are gone
        assert "NameError" in output
        _, last = run(visitor, 2, "kept = []\nwhile True: kept.append(bytearray(50_000_000))", number=6)
        assert "of memory, more than 900.0 MiB" in last["end"]["ended"]
        _, last = run(visitor, 2, "import os\nos._exit(3)", number=6)
        assert "its process ended" in last["end"]["ended"]
        escaped = "import subprocess, sys\nsubprocess.Popen(['sleep', '30'], start_new_session=True)\nwhile True: pass"
        begun = time.monotonic()
        assert "still running" in run(visitor, 2, escaped)[1]["end"]["ended"]
        assert time.monotonic() - begun < 20  # though what it started holds the pipe
        output, _ = run(visitor, 2, "print('x' * 300_000)", number=6)
        assert len(output) < 210_000
        assert output.endswith("is not shown\n")


@pytest.mark.skipif(sys.platform != "linux", reason="its processes are forks, which are tried on Linux alone")
def test_one_step_of_a_lesson_runs_at_a_time_and_the_server_ends_with_all_that_runs(
    forked_children: None, tmp_path: Path
) -> None:
    told = tmp_path / "pid"
    code = f"import os, pathlib, time\npathlib.Path({str(told)!r}).write_text(str(os.getpid()))\ntime.sleep(600)"
    with served() as address:
        visitor = Visitor(address).enter()
        endless = threading.Thread(target=run, args=(visitor, 1, code))
        endless.start()
        wait_for(lambda: told.exists() and told.read_text())
        again = visitor.post("run", {"lesson": 3, "step": 2, "code": "1"})
        assert (again.status, again.data["error"]) == (400, "a step of this lesson is running")
        assert visitor.post("open", {"lesson": 3}).data["busy"] is True
        begun = time.monotonic()
    endless.join()
    assert time.monotonic() - begun < 20
    assert gone([int(told.read_text())])


def wait_for(call: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not call():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_an_exercise_is_checked_with_hints_kept_and_solved(visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(chosen: Exercise, file: Path, **_: Any) -> Result:
        verdicts = (CheckVerdict("it runs", True), CheckVerdict("it is solved", "solved" in file.read_text(), "a hint"))
        return Result(chosen.lesson, verdicts, "cpu", "what it printed")

    monkeypatch.setattr(server, "check", check)
    begun = visitor.post("check", {"lesson": 3, "text": "begun"}).data
    assert (begun["passed"], begun["right"], begun["verdicts"][1]["hint"]) == (False, 1, "a hint")
    assert not LearnerProgress.load().exercises["3"]["passed"]
    page = visitor.send("GET", "/lesson/3").text
    assert "1 of 2 right" in page
    assert "\nbegun</textarea>" in page
    assert visitor.post("check", {"lesson": 3, "text": "solved"}).data["passed"]
    assert LearnerProgress.load().exercises["3"]["passed"]
    assert "exercise: passed" in visitor.send("GET", "/").text
    assert visitor.post("solution", {"lesson": 3}).data["text"] == exercise(3).solution.read_text()


def test_the_quiz_judges_and_keeps(visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = visitor.post("answer", {"question": "mismatch", "given": "b"}).data
    assert (wrong["right"], wrong["score"]) == (False, "0 of 26 answered right")
    assert "RuntimeError" in wrong["answer"]
    right = visitor.post("answer", {"question": "move-line", "given": "x = x.to(device)"}).data
    assert (right["right"], right["score"]) == (True, "1 of 26 answered right")
    assert LearnerProgress.load().quiz == {"mismatch": False, "move-line": True}
    monkeypatch.setattr(quiz, "TIME", 1)
    for line in ("device = 9**9**9**9", "device = 'x' * 10**12", "device = \0", "device = " + "(" * 400):
        assert visitor.post("answer", {"question": "portable", "given": line}).data["right"] is False


# The command.


def test_the_command_serves_until_ctrl_c_and_does_not_import_torch(tmp_path: Path) -> None:
    script = "import sys; sys.argv = ['hotloop', 'learn', '--web', '--no-browser', '--port', '0']\n"
    script += "from hotloop.cli import main\ntry: main()\nfinally: print('loaded:', 'torch' in sys.modules)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        [address] = re.findall(r"http://127\.0\.0\.1:\d+/\?token=\S+", serving.stdout.readline())
        assert "has your permissions" in serving.stdout.readline()
        assert "The golden rule" in Visitor(address).enter().send("GET", "/").text
        serving.send_signal(signal.SIGINT)
        assert serving.stdout.read() == "loaded: False\n"
    assert serving.returncode == 0


def test_the_browser_is_given_a_file_so_that_no_list_of_processes_shows_the_token(
    monkeypatch: pytest.MonkeyPatch, data_folder: Path
) -> None:
    opened: list[str] = []

    def open_it(address: str) -> bool:
        opened.append(address)
        file = Path(unquote(urlsplit(address).path))
        opened.append(file.read_text())
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        os.kill(os.getpid(), signal.SIGTERM)
        return True

    monkeypatch.setattr(web.webbrowser, "open", open_it)
    monkeypatch.setattr(web.webbrowser, "get", object)
    told: list[str] = []
    web.serve(port=0, ready=told.append)
    where, letter = opened
    assert where.startswith("file:///")
    assert f'url={told[0]}"' in letter
    assert "token" not in where
    assert list(data_folder.iterdir()) == []  # the letter is gone


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hotloop.apps.learn.server")
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(HotloopError, match="aiohttp") as caught:
        web.serve(port=0, browser=False)
    assert caught.value.fix == "pip install 'hotloop[web]'"
