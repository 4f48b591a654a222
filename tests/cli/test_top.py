"""`hotloop top`: samples as text and data, what ends them, and arguments that cannot be meant."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotloop.apps.top.advice import Advice
from hotloop.cli import main
from hotloop.monitor.reading import Reading

from ..thorough import some


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hotloop", "top", *arguments]


def environment(**environ: str) -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "COLUMNS"} | environ


def top(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=120, check=False, env=environment(**environ)
    )


class Ran:
    """`hotloop top` in this process: quicker than a new one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["hotloop", "top", *arguments])
        monkeypatch.setattr("hotloop.apps.top.plain.SOON", 0.01)
        with pytest.raises(SystemExit) as ended:
            main()
        self.code = ended.value.code or 0
        self.out, self.err = capsys.readouterr()


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *arguments: Ran(monkeypatch, capsys, *arguments)


def test_help_teaches(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    told = run("--help").out
    assert "Examples" in told
    assert "hotloop top --json --interval 5" in told
    assert "--web" in told


def test_the_machine_itself_as_one_object_and_without_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hotloop", "top", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    data = json.loads(done.stdout)
    reading = Reading.from_json(data)
    assert reading.host.memory_total
    assert reading.host.cpu is not None  # known because it looked twice
    assert all(Advice.from_json(each) for each in data["advice"])
    assert not any(line.rsplit("|", 1)[-1].strip() == "torch" for line in done.stderr.splitlines())


def test_once_is_text_without_escapes_in_a_pipe(run: Run) -> None:
    done = run("--once", "--example", "2")
    assert done.code == 0
    assert done.out.count("NVIDIA H200") == 2
    assert "\x1b" not in done.out
    assert done.err == ""


def test_without_a_gpu_the_host_is_shown_and_the_reason(run: Run) -> None:
    done = run("--once", "--example", "0")
    assert "RAM" in done.out
    assert done.code == 0


def test_json_with_an_interval_is_a_line_for_each_sample(run: Run) -> None:
    done = run("--json", "--interval", "0.1", "--count", "3", "--example", "1")
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert len(lines) == 3
    assert [line["gpus"][0]["name"] for line in lines] == ["NVIDIA H200"] * 3
    assert lines[0]["time"] < lines[2]["time"]


def test_once_with_json_is_one_object(run: Run) -> None:
    assert json.loads(run("--once", "--json", "--example", "1").out)["driver"] == "580.95.05"


def test_only_processes_of_a_user(run: Run) -> None:
    out = run("--once", "--example", "1", "--user", "guest").out
    assert "1 process by memory, user guest" in out
    assert "Xorg" not in out


@pytest.mark.parametrize("how", [("--once",), ("--json",), ("--json", "--count", "1"), ("--count", "1")])
def test_the_log_gets_every_sample(run: Run, tmp_path: Path, how: tuple[str, ...]) -> None:
    log = tmp_path / "deep" / "gpu.jsonl"
    for _ in range(2):
        run(*how, "--example", "1", "--log", str(log))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(lines) == 2
    assert all(Reading.from_json(line).gpus[0].name == "NVIDIA H200" for line in lines)
    assert all("advice" in line for line in lines)


def test_a_log_that_cannot_be_written_is_told_before_anything_is_shown(run: Run, tmp_path: Path) -> None:
    done = run("--once", "--example", "1", "--log", str(tmp_path))
    assert done.code == 2
    assert "cannot write" in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--interval", "0"), "from 0.1"),
        (("--interval", "nan"), "from 0.1"),
        (("--interval", "-1"), "from 0.1"),
        (("--count", "0"), "at least 1"),
        (("--once", "--count", "2"), "--once is one sample"),
        (("--once", "--interval", "2"), "--once is one sample"),
        (("--web", "--json"), "--web"),
        (("--web", "--once"), "--web"),
        (("--interval", "soon"), "--interval"),
    ],
)
def test_what_cannot_be_meant_is_told(run: Run, arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments, "--example", "1")
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("how", some([("--json",), ()], [("--json",)]))
def test_a_reader_that_has_seen_enough_ends_it_quietly(how: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        command(*how, "--interval", "0.1", "--example", "1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(120) != 0
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize("how", [("--json",), ()])
def test_a_sample_is_there_as_soon_as_it_is_taken_and_ctrl_c_ends_it_quietly(how: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        command(*how, "--interval", "3600", "--example", "1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # what is not read here is left for `communicate`
        env=environment(),
    )
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], 60)[0]
        process.send_signal(signal.SIGINT)
    except BaseException:
        process.kill()
        raise
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err == b""
    assert all(json.loads(line) for line in out.splitlines()) if how else b"RAM" in out


def test_web_is_served_with_the_options(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hotloop.apps.top import web

    called: dict[str, object] = {}

    def serve(read: Callable[[], Reading], **options: Any) -> None:
        called.update(options, reading=read())
        options["ready"]("http://127.0.0.1:9/")

    monkeypatch.setattr(web, "serve", serve)
    log = tmp_path / "log.jsonl"
    done = run("--web", "--port", "9", "--interval", "2", "--token", "swordfish", "--example", "1", "--log", str(log))
    assert done.code == 0
    assert "http://127.0.0.1:9/" in done.out
    assert (called["host"], called["port"], called["token"], called["every"]) == ("127.0.0.1", 9, "swordfish", 2.0)
    assert isinstance(called["reading"], Reading)
    assert len(log.read_text().splitlines()) == 1


def test_web_without_its_package_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "hotloop.apps.top.server", raising=False)  # where another test has served already
    done = run("--web", "--port", "0", "--example", "1")
    assert done.code == 2
    assert "pip install 'hotloop[web]'" in done.err


def test_a_demo_is_labelled_as_one_everywhere(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    text = run("--demo", "--count", "2", "--interval", "0.1", "--log", str(log)).out
    assert [line for line in text.splitlines() if line.startswith("hotloop top")]
    assert all("DEMO: made-up readings" in line for line in text.splitlines() if line.startswith("hotloop top"))
    assert "GPU 1 NVIDIA H200" in text
    sample = json.loads(run("--demo", "--json").out)
    for each in (sample, *map(json.loads, log.read_text().splitlines())):
        assert each["host"]["name"] == "DEMO: made-up readings"
        assert len(each["gpus"]) == 2


@pytest.mark.parametrize(("width", "height"), [(120, 40), (80, 24), (60, 12), (40, 5), (30, 2)])
def test_a_demo_is_labelled_as_one_in_a_terminal_of_any_size(width: int, height: int) -> None:
    from hotloop.apps.top.example import DEMO, machine
    from hotloop.apps.top.history import History
    from hotloop.apps.top.view import screen

    reading = machine(2, name=DEMO)()
    lines = screen(reading, History(60), (), width=width, height=height)
    assert "DEMO" in lines[0].plain


@pytest.mark.gpu
def test_the_gpu_as_nvidia_smi_tells_of_it() -> None:
    import torch

    data = json.loads(top("--json").stdout)
    names = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert [gpu["name"] for gpu in data["gpus"]] == names
    assert torch.cuda.get_device_name(0) in names
    for gpu in data["gpus"]:
        assert gpu["memory_total"] > 0
        assert gpu["utilisation"] is not None
    assert names[0] in top("--once").stdout
