"""The gate: who is answered, who is not, and that the token stays where it belongs."""

import asyncio
import re
import socket
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.top.access import Gate, is_local
from hotloop.apps.top.feed import Feed
from hotloop.apps.top.web import serving

from .pretend import Machine, ask, served, workstation

TOKEN = "correct-horse-battery"  # noqa: S105  # of these tests alone


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(Feed(Machine(workstation(0)), every=0.1)) as found:
        yield found


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    with served(Feed(Machine(workstation(0))), token=TOKEN) as found:
        yield found.partition("?")[0]


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:1", "127.1.2.3", "[::1]:9", "LOCALHOST"])
def test_names_of_this_machine_are_answered(address: str, host: str) -> None:
    assert ask(address, Host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["example.org", "localhost.example.org", "127.0.0.1.nip.io:8080", "10.0.0.1", "user@localhost", "", "[::1"]
)
@pytest.mark.parametrize("path", ["/", "/events", "/api/readings", "/metrics"])
def test_other_names_are_not_answered_on_loopback(address: str, host: str, path: str) -> None:
    assert ask(address, path, Host=host)[0] in {400, 403}


@given(st.text(st.characters()))
def test_no_garbage_is_a_name_of_this_machine(host: str) -> None:
    if is_local(host):
        assert re.fullmatch(r"(localhost|127(\.\d+){3}|\[[0-9a-f:.]+\])(:\d*)?", host, re.I | re.A)


def test_other_origins_are_not_answered(address: str) -> None:
    own = address.rstrip("/")
    assert ask(address, "/api/readings", Origin=own)[0] in {200, 503}
    for origin in ("http://example.org", "null", own + "0", own.replace("http:", "https:"), "http://localhost:1"):
        assert ask(address, "/api/readings", Origin=origin)[0] == 403
    for site in ("cross-site", "same-site", "else"):
        assert ask(address, "/api/readings", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors")[0] == 403
        assert ask(address, Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="iframe")[0] == 403
    assert ask(address, Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors")[0] == 200


def test_a_link_from_elsewhere_may_be_followed(address: str) -> None:
    assert ask(address, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document")[0] == 200


@pytest.mark.parametrize("path", ["/", "/page.js", "/events", "/api/readings", "/metrics", "/nothing", "/?token=wrong"])
def test_without_the_token_there_is_nothing(guarded: str, path: str) -> None:
    status, headers, body = ask(guarded, path)
    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert "Set-Cookie" not in headers
    assert "kestrel" not in body


@pytest.mark.parametrize(
    "word", ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer é"]
)
def test_a_wrong_bearer_is_no_bearer(guarded: str, word: str) -> None:
    assert ask(guarded, "/metrics", Authorization=word)[0] == 401


def test_a_program_brings_the_token_in_a_header(guarded: str) -> None:
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


def test_the_token_sends_nobody_elsewhere(guarded: str) -> None:
    status, headers, _ = ask(guarded, f"//example.org?token={TOKEN}")
    assert status in {401, 404}
    assert "Location" not in headers


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


def test_beyond_this_machine_a_token_is_made() -> None:
    async def run() -> tuple[str, int]:
        async with serving(Feed(Machine()), host="0.0.0.0", port=0) as found:  # noqa: S104  # that is the point
            where = f"http://127.0.0.1:{urlsplit(found).port}/"
            return found, (await asyncio.to_thread(ask, where))[0]

    found, status = asyncio.run(run())
    [token] = parse_qs(urlsplit(found).query)["token"]
    assert len(token) >= 32
    assert status == 401


def test_two_servers_do_not_share_a_session() -> None:
    one, other = Gate(TOKEN, loopback=True), Gate(TOKEN, loopback=True)
    assert one.knows({}, one.session)
    assert not one.knows({}, other.session)
