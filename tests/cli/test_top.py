"""`hotloop top`: samples as text and data, what ends them, and arguments that cannot be meant."""

import json
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from hotloop.apps.top.advice import Advice
from hotloop.monitor.reading import Reading

from .conftest import Run

DEMO = "DEMO: made-up readings"


def begun(*arguments: str) -> "subprocess.Popen[bytes]":
    """`hotloop top` in a process of its own; what is not read here is left for `communicate`."""
    command = [sys.executable, "-m", "hotloop", "top", "--demo", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


VERB = ("top",)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.apps.top.live.SOON", 0.01)


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


def test_once_is_text_without_escapes_in_a_pipe_and_a_demo_is_labelled(run: Run) -> None:
    done = run("--once", "--demo")
    assert (done.code, done.err) == (0, "")
    assert done.out.count("NVIDIA H200") == 2
    assert done.out.startswith(f"hotloop top · {DEMO}")
    assert "\x1b" not in done.out
    for how in ("--json",), ("--json", "--once"):
        sample = json.loads(run("--demo", *how).out)
        assert (sample["driver"], sample["host"]["name"], len(sample["gpus"])) == ("580.95.05", DEMO, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--interval", "0"), "from 0.1"),
        (("--interval", "nan"), "from 0.1"),
        (("--interval", "-1"), "from 0.1"),
        (("--interval", "soon"), "--interval"),
        (("--web", "--json"), "--web"),
        (("--web", "--once"), "--web"),
        (("--web", "--port", "65536"), "--port"),
    ],
)
def test_what_cannot_be_meant_is_told(run: Run, arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments, "--demo")
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err


def test_a_reader_that_has_seen_enough_ends_it_quietly() -> None:
    with begun("--json", "--interval", "0.1") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert lines[0]["time"] < lines[2]["time"]
        process.stdout.close()
        assert process.wait(120) != 0
        assert process.stderr.read() == b""


def test_a_sample_is_there_as_soon_as_it_is_taken_and_ctrl_c_ends_it_quietly() -> None:
    with begun("--json", "--interval", "3600") as process:
        try:
            assert select.select([process.stdout], [], [], 60)[0]
            process.send_signal(signal.SIGINT)
        except BaseException:
            process.kill()
            raise
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err == b""
    assert all(json.loads(line) for line in out.splitlines())


def test_web_is_served_with_the_options(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotloop.apps.top import web

    called: dict[str, Any] = {}

    def serve(read: Callable[[], Reading], **options: Any) -> None:
        called.update(options, reading=read())
        options["ready"]("http://127.0.0.1:9/")

    monkeypatch.setattr(web, "serve", serve)
    done = run("--web", "--port", "9", "--interval", "2", "--token", "swordfish", "--demo")
    assert done.code == 0
    assert "http://127.0.0.1:9/" in done.out
    assert (called["host"], called["port"], called["token"], called["every"]) == ("127.0.0.1", 9, "swordfish", 2.0)
    assert isinstance(called["reading"], Reading)


@pytest.mark.gpu
def test_the_gpu_as_nvidia_smi_tells_of_it() -> None:
    import torch

    def top(how: str) -> str:
        command = [sys.executable, "-m", "hotloop", "top", how]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    data = json.loads(top("--json"))
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
    assert names[0] in top("--once")
