"""The server: what it answers, to whom, under which headers, and that nothing a client does makes it grow or fall."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from hotloop.apps.top.access import Gate
from hotloop.apps.top.feed import Feed, HardwareSample
from hotloop.apps.top.server import ASSETS, application
from hotloop.apps.top.web import serve
from hotloop.errors import BadArgument, HotloopError
from hotloop.monitor.reading import Gpu, Host, Process, Reading

from ..thorough import some, tries
from .pretend import Machine, ask, served, workstation

TOKEN = "correct-horse-battery"  # noqa: S105  # of these tests alone
NAUGHTY = "<img src=x onerror=alert(1)>\x1b[2J\n\ndata: {}\r\n</script>\u202e\udc80"


def never() -> Reading:
    raise AssertionError("nobody asked for a reading")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(Feed(Machine(workstation(0)), every=0.1)) as found:
        yield found


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    with served(Feed(Machine(workstation(0))), token=TOKEN) as found:
        yield found.partition("?")[0]


def readings(address: str, query: str = "") -> dict[str, Any]:
    while True:
        status, _, body = ask(address, "/api/readings" + query)
        if status == 200:
            return json.loads(body)  # type: ignore[no-any-return]
        assert (status, body) == (503, "Nothing has been read yet.")


def test_the_page_and_all_it_asks_for_come_from_here(address: str) -> None:
    _, _, page = ask(address)
    wanted = set(re.findall(r'(?:src|href)="([^"]+)"', page))
    for path in list(wanted & set(ASSETS)):
        wanted |= {f"/{name}" for name in re.findall(r'from "\./([^"]+)"', ask(address, path)[2])}
    assert wanted == set(ASSETS) - {"/"} | {"/api/readings", "/metrics"}
    assert {path: ask(address, path)[0] for path in wanted} == dict.fromkeys(wanted, 200)


@pytest.mark.parametrize("path", ASSETS)
def test_no_file_names_another_machine_or_makes_markup_of_text(address: str, path: str) -> None:
    _, headers, body = ask(address, path)
    assert headers.get_content_type() == ASSETS[path][1]
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", body)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bon[a-z]+=|style=", body)


@pytest.mark.parametrize("path", ["/", "/page.js", "/events", "/api/readings", "/metrics", "/nothing"])
def test_every_answer_has_strict_headers(guarded: str, path: str) -> None:
    _, headers, _ = ask(guarded, path)
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect", "img")} == {"'self'"}
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["Cache-Control"] == "no-store"
    assert "aiohttp" not in headers["Server"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/readings"])
def test_only_get_is_answered(address: str, method: str, path: str) -> None:
    assert ask(address, path, method)[0] == 405


def test_the_latest_reading_comes_back_equal(address: str) -> None:
    told = readings(address)
    assert HardwareSample.from_json(told).reading == workstation(0)
    assert set(told) == {"number", "reading", "advice", "trouble"}
    assert len(readings(address, "?history=1")["history"]["times"]) == 1


def test_metrics_are_what_prometheus_reads(address: str) -> None:
    readings(address)
    _, headers, body = ask(address, "/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found = {family.name: family for family in text_string_to_metric_families(body)}
    assert [sample.value for sample in found["DCGM_FI_DEV_POWER_MGMT_LIMIT"].samples] == [450, 450]


# Events.


@asynccontextmanager
async def client(feed: Feed, **settings: Any) -> AsyncIterator[TestClient[Any, Any]]:
    async with TestClient(TestServer(application(feed, Gate(None, loopback=True), **settings))) as found:
        yield found
        feed.close()


async def event(response: Any) -> dict[str, str]:
    """The next event of a stream, by field."""
    found = {}
    while line := (await asyncio.wait_for(response.content.readline(), 60)).decode().rstrip("\n"):
        name, _, value = line.partition(": ")
        assert name not in found
        found[name] = value
    return found


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))  # type: ignore[arg-type]


def test_events_begin_with_the_hour_and_go_on_with_samples() -> None:
    async def scene() -> None:
        feed = Feed(never, every=1.5)
        feed.take(workstation(0))
        async with client(feed) as browser:
            response = await browser.get("/events")
            assert response.content_type == "text/event-stream"
            first = await event(response)
            assert (first["event"], int(first["retry"]) > 0) == ("history", True)
            history = json.loads(first["data"])
            assert (history["every"], len(history["times"])) == (1.5, 1)
            for number in (1, 2, 3):
                found = await event(response)
                assert (found["event"], found["id"]) == ("sample", str(number))
                assert json.loads(found["data"])["reading"]["host"]["name"] == "kestrel"
                feed.take(workstation(number))

    play(scene)


def test_silence_is_filled_with_heartbeats() -> None:
    async def scene() -> None:
        async with client(Feed(never), heartbeat=0.01) as browser:
            response = await browser.get("/events")
            assert [(await event(response))["event"] for _ in range(3)] == ["history", "beat", "beat"]

    play(scene)


def test_there_is_room_for_so_many_listeners_and_it_is_given_back() -> None:
    async def scene() -> None:
        async with client(Feed(never), listeners=2, heartbeat=0.01) as browser:
            open_pages = [await browser.get("/events") for _ in range(2)]
            refused = await browser.get("/events")
            assert (refused.status, "Retry-After" in refused.headers) == (503, True)
            assert (await browser.get("/")).status == 200
            open_pages[0].close()
            while (again := await browser.get("/events")).status == 503:
                await asyncio.sleep(0.01)
            assert (await event(again))["event"] == "history"

    play(scene)


def test_a_client_that_does_not_read_is_sent_the_latest_and_nothing_piles_up() -> None:
    many = tries(1200, 3000)
    bulk = tuple(f"{number}" * 160 for number in range(100, 200))  # 50 kB a sample

    async def scene() -> None:
        feed = Feed(never)
        async with client(feed) as browser:
            reader, writer = await asyncio.open_connection("127.0.0.1", browser.port, limit=2**22)
            writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while b"history" not in await reader.readline():
                pass
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            for second in range(many):
                feed.take(Reading(float(second), Host(), notes=bulk))
                await asyncio.sleep(0)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            numbers = []
            while many not in numbers:
                line = await reader.readline()
                if line.startswith(b"id: "):
                    numbers.append(int(line[4:]))
            assert numbers == sorted(numbers)
            assert len(numbers) < many / 4
            writer.close()

    play(scene)


def test_garbage_in_names_cannot_end_an_event_or_become_another() -> None:
    process = Process(1, 1, "compute", name=NAUGHTY, command=NAUGHTY, user=NAUGHTY)
    reading = Reading(
        1.0, Host(name=NAUGHTY), (Gpu(0, NAUGHTY, processes=(process,), error=NAUGHTY),), notes=(NAUGHTY,)
    )

    async def scene() -> None:
        feed = Feed(never)
        feed.take(reading, trouble=NAUGHTY)
        async with client(feed) as browser:
            response = await browser.get("/events")
            assert (await event(response))["event"] == "history"
            found = await event(response)
            assert set(found) == {"id", "event", "data"}
            assert found["data"].isprintable()
            told = await (await browser.get("/api/readings")).text()
            assert told.isascii()
            assert told.isprintable()
            assert HardwareSample.from_json(json.loads(told)) == feed.latest
            assert (await browser.get("/metrics")).status == 200

    play(scene)


# What goes wrong before anything is served.


def try_to_serve(**settings: Any) -> None:
    serve(never, ready=lambda address: pytest.fail(f"it is served at {address}"), **settings)


def test_a_port_that_is_taken_is_named_with_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HotloopError, match=rf"port {port} is taken") as caught:
            try_to_serve(port=port)
    assert "--port" in str(caught.value.fix)


def test_a_port_that_needs_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(HotloopError, match="may not listen on port 80") as caught:
        try_to_serve(port=80)
    assert "above 1023" in str(caught.value.fix)


@pytest.mark.parametrize("host", ["203.0.113.7", "nowhere", "", "a" * 300, "a\0b", "\udc80"])
def test_a_host_that_this_machine_is_not(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def without_asking_the_network(name: str, *rest: Any, **settings: Any) -> Any:
        if name == "nowhere":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(name, *rest, **settings)

    monkeypatch.setattr(socket, "getaddrinfo", without_asking_the_network)
    with pytest.raises(BadArgument, match="has no address") as caught:
        try_to_serve(host=host, port=0)
    assert "127.0.0.1" in str(caught.value.fix)


@pytest.mark.parametrize(
    "wrong",
    [{"port": -1}, {"port": 65536}, {"every": 0.0}, {"every": float("nan")}, {"token": ""}, {"token": "a b" * 9}],
)
def test_settings_that_cannot_be_meant(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadArgument):
        try_to_serve(**wrong)


@pytest.mark.parametrize("package", ["aiohttp", "prometheus_client"])
def test_without_the_extra_the_error_says_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("server", "exporter"):
        monkeypatch.delitem(sys.modules, f"hotloop.apps.top.{module}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(HotloopError, match=package) as caught:
        try_to_serve(port=0)
    assert caught.value.fix == "pip install 'hotloop[web]'"


@pytest.mark.parametrize("number", some([signal.SIGINT, signal.SIGTERM], [signal.SIGINT]))  # a door ends by the other
def test_it_serves_until_it_is_told_to_end(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(
        "import sys\n"
        "from hotloop.monitor.reading import Host, Reading\n"
        "from hotloop.apps.top.web import serve\n"
        "serve(lambda: Reading(0.0, Host('kestrel')), port=0)\n"
        "print('torch' in sys.modules)\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as ran:
        assert ran.stdout is not None
        [found] = re.findall(r"http://127\.0\.0\.1:\d+/", ran.stdout.readline())
        assert readings(found)["reading"]["host"]["name"] == "kestrel"
        ran.send_signal(number)
        assert ran.stdout.read() == "False\n"
    assert ran.returncode == 0
