"""The server: what it answers, to whom, under which headers, and that nothing a client does makes it grow or fall."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from hotloop.apps.top.access import Gate, is_local
from hotloop.apps.top.feed import Feed, HardwareSample
from hotloop.apps.top.server import ASSETS, application
from hotloop.apps.top.web import serve
from hotloop.errors import BadArgument, HotloopError
from hotloop.monitor.reading import Host, Reading

from ..thorough import tries
from .pretend import Machine, ask, served, workstation

TOKEN = "correct-horse-battery"  # noqa: S105  # of these tests alone


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
    for path, (_, kind) in ASSETS.items():
        _, headers, body = ask(address, path)
        assert headers.get_content_type() == kind
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", body), "another machine"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\bon[a-z]+=|style=", body)


@pytest.mark.parametrize("path", ["/", "/page.js", "/events", "/api/readings", "/metrics", "/nothing"])
def test_every_answer_has_strict_headers(guarded: str, path: str) -> None:
    _, headers, _ = ask(guarded, path)
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "connect", "img")} == {"'self'"}
    strict = {"Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}
    assert strict | {"Cache-Control": "no-store"} == {name: headers[name] for name in (*strict, "Cache-Control")}
    assert "aiohttp" not in headers["Server"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
def test_only_get_is_answered(address: str, method: str) -> None:
    assert {ask(address, path, method)[0] for path in ("/", "/api/readings")} == {405}


def test_the_latest_reading_comes_back_equal(address: str) -> None:
    told = readings(address)
    assert HardwareSample.from_json(told).reading == workstation(0)
    assert set(told) == {"number", "reading", "advice", "trouble"}
    assert len(readings(address, "?history=1")["history"]["times"]) == 1
    _, headers, body = ask(address, "/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found = {family.name: family for family in text_string_to_metric_families(body)}
    assert [sample.value for sample in found["DCGM_FI_DEV_POWER_MGMT_LIMIT"].samples] == [700, 700]


# Who is answered.


@pytest.mark.parametrize(
    "host", ["example.org", "localhost.example.org", "127.0.0.1.nip.io:8080", "10.0.0.1", "user@localhost", "", "[::1"]
)
def test_other_names_are_not_answered_on_loopback(address: str, host: str) -> None:
    assert {ask(address, path, Host=host)[0] for path in ("/", "/events", "/metrics")} <= {400, 403}


@given(st.text(st.characters()))
def test_no_garbage_is_a_name_of_this_machine(host: str) -> None:
    if is_local(host):
        assert re.fullmatch(r"(localhost|127(\.\d+){3}|\[[0-9a-f:.]+\])(:\d*)?", host, re.I | re.A)


def test_other_origins_are_not_answered(address: str) -> None:
    own = address.rstrip("/")
    for host in ("localhost", "localhost:8080", "127.0.0.1:1", "127.1.2.3", "[::1]:9", "LOCALHOST"):
        assert ask(address, Host=host)[0] == 200
    assert ask(address, "/api/readings", Origin=own)[0] in {200, 503}
    for origin in ("http://example.org", "null", own + "0", own.replace("http:", "https:"), "http://localhost:1"):
        assert ask(address, "/api/readings", Origin=origin)[0] == 403
    for site in ("cross-site", "same-site", "else"):
        assert ask(address, "/api/readings", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors")[0] == 403
        assert ask(address, Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="iframe")[0] == 403
    assert ask(address, Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors")[0] == 200
    followed = {"Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert ask(address, Sec_Fetch_Site="cross-site", **followed)[0] == 200, "a link from elsewhere may be followed"


@pytest.mark.parametrize("path", ["/", "/page.js", "/events", "/api/readings", "/metrics", "/nothing", "/?token=wrong"])
def test_without_the_token_there_is_nothing(guarded: str, path: str) -> None:
    status, headers, body = ask(guarded, path)
    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert "Set-Cookie" not in headers
    assert "kestrel" not in body


def test_a_program_brings_the_token_in_a_header(guarded: str) -> None:
    for wrong in ("", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer é"):
        assert ask(guarded, "/metrics", Authorization=wrong)[0] == 401
    assert ask(guarded, "/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert ask(guarded, "/metrics", Authorization=f"Bearer {TOKEN}", Host="example.org")[0] == 403


def test_a_browser_changes_the_token_for_a_cookie(guarded: str) -> None:
    status, headers, _ = ask(guarded, f"/api/readings?token={TOKEN}&history=1")
    assert (status, headers["Location"]) == (303, "/api/readings?history=1")
    cookie, *settings = headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict"} <= set(settings)
    assert TOKEN not in cookie
    assert ask(guarded, "/", Cookie=cookie)[0] == 200
    assert ask(guarded, "/", Cookie=cookie + "x")[0] == 401
    assert not Gate(TOKEN, loopback=True).knows({}, cookie.partition("=")[2]), "another server has other sessions"
    status, headers, _ = ask(guarded, f"//example.org?token={TOKEN}")
    assert status in {401, 404}
    assert "Location" not in headers, "the token sends nobody elsewhere"


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02 this is TLS\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET http://[\x1b[2J HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /%ff%00?token=%ff HTTP/1.1\r\nHost: localhost\r\nCookie: =;\xff\r\nAuthorization: Bearer \xff\r\n\r\n",
    ],
)
def test_what_strangers_send_is_refused_and_not_written_to_the_terminal(
    guarded: str, junk: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", urlsplit(guarded).port), timeout=60) as connection:
        connection.sendall(junk)
        assert re.match(rb"HTTP/1\.[01] 40[01] ", connection.recv(4096))
    assert ask(guarded)[0] == 401
    assert capfd.readouterr() == ("", "")


# Events.


@asynccontextmanager
async def client(feed: Feed, **settings: Any) -> AsyncIterator[TestClient[Any, Any]]:
    feed.start = lambda: None  # type: ignore[method-assign]  # its samples come from the test
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


def test_silence_is_filled_with_heartbeats_and_room_for_listeners_is_given_back() -> None:
    async def scene() -> None:
        async with client(Feed(never), listeners=2, heartbeat=0.01) as browser:
            open_pages = [await browser.get("/events") for _ in range(2)]
            assert [(await event(open_pages[0]))["event"] for _ in range(3)] == ["history", "beat", "beat"]
            refused = await browser.get("/events")
            assert (refused.status, "Retry-After" in refused.headers) == (503, True)
            assert (await browser.get("/")).status == 200
            open_pages[0].close()
            while (again := await browser.get("/events")).status == 503:
                await asyncio.sleep(0.01)
            assert (await event(again))["event"] == "history"

    play(scene)


def test_a_client_that_does_not_read_is_sent_the_latest_and_nothing_piles_up(monkeypatch: pytest.MonkeyPatch) -> None:
    many = tries(400, 3000)
    monkeypatch.setattr(HardwareSample, "encoded", "x" * 200_000)  # as of a machine with thousands of processes

    async def scene() -> None:
        feed = Feed(never)
        async with client(feed) as browser:
            small = socket.socket()
            small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)  # what the system keeps for who does not read
            small.connect(("127.0.0.1", browser.port))
            reader, writer = await asyncio.open_connection(sock=small, limit=2**22)
            writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while b"history" not in await reader.readline():
                pass
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            for second in range(many):
                feed.take(Reading(float(second), Host()))
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


# What goes wrong before anything is served, and the whole of it.


def try_to_serve(**settings: Any) -> None:
    serve(never, ready=lambda address: pytest.fail(f"it is served at {address}"), **settings)


def test_a_port_that_is_taken_and_a_host_that_this_machine_is_not_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(BadArgument, match=rf"port {port}.*in use") as caught:
            try_to_serve(port=port)
    assert "--port" in str(caught.value.fix)
    for host in ("203.0.113.7", "a" * 300, "a\0b", "\udc80"):
        with pytest.raises(BadArgument, match="cannot listen on") as caught:
            try_to_serve(host=host, port=0)
        assert "127.0.0.1" in str(caught.value.fix)


@pytest.mark.parametrize("token", ["", "short", "a b" * 9, "ééééééééé"])
def test_a_token_that_is_easily_guessed_or_cannot_be_sent(token: str) -> None:
    with pytest.raises(BadArgument, match="token"):
        try_to_serve(token=token)


@pytest.mark.parametrize("package", ["aiohttp", "prometheus_client"])
def test_without_the_extra_the_error_says_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("server", "exporter"):
        monkeypatch.delitem(sys.modules, f"hotloop.apps.top.{module}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(HotloopError, match=package) as caught:
        try_to_serve(port=0)
    assert caught.value.fix == "pip install 'hotloop[web]'"


@contextmanager
def command(*arguments: str, **environ: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The line with the address that `hotloop top --web` prints, and its process."""
    asked = [sys.executable, "-m", "hotloop", "top", "--demo", "--web", "--port", "0", *arguments]
    out, err = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(asked, stdout=out, stderr=err, text=True, env={**os.environ, **environ}) as ran:
        assert ran.stdout is not None
        yield ran.stdout.readline(), ran
        ran.kill()


def test_it_serves_until_it_is_told_to_end_and_a_token_of_the_environment_is_not_printed() -> None:
    with command(HOTLOOP_TOKEN=TOKEN) as (line, ran):
        [address] = re.findall(r"http://127\.0\.0\.1:\d+/", line)
        assert "in a browser, put the token itself there" in line
        assert ask(address)[0] == 401
        assert ask(address, f"/?token={TOKEN}")[0] == 303
        ran.send_signal(signal.SIGINT)
        assert ran.stdout is not None
        assert ran.stdout.read() == ""
        assert ran.wait(60) == 0
        assert TOKEN not in line


def test_beyond_this_machine_a_token_is_made() -> None:
    with command("--bind", "0.0.0.0") as (line, ran):  # noqa: S104  # that is the point
        [found] = re.findall(r"http://\S+", line)
        [token] = parse_qs(urlsplit(found).query)["token"]
        assert len(token) >= 32
        here = f"http://127.0.0.1:{urlsplit(found).port}/"
        assert ask(here)[0] == 401
        assert ask(here, Authorization=f"Bearer {token}")[0] == 200
        ran.send_signal(signal.SIGTERM)
        assert ran.wait(60) == 0
