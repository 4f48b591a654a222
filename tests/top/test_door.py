"""The door: however many come and say nothing, the others are answered, and nothing is written about it."""

import asyncio
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, closing, suppress

import pytest

from hotloop.apps.top.access import Gate
from hotloop.apps.top.door import Door
from hotloop.apps.top.feed import Feed
from hotloop.apps.top.server import application, listening
from hotloop.monitor.reading import Host, Reading

from .pretend import ask

HALF = b"GET / HTTP/1.1\r\nHost: local"
REST = b"host\r\n\r\n"
TOKEN = "correct-horse-battery"  # noqa: S105  # of these tests alone


def test_those_who_send_half_a_header_shut_nobody_out_and_fill_no_terminal() -> None:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))

    with (
        subprocess.Popen(
            [sys.executable, "-m", "hotloop", "top", "--web", "--port", "0", "--example", "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=few_files,  # noqa: PLW1509  # no thread of this process holds a lock that it takes
        ) as server,
        ExitStack() as stack,
    ):
        assert server.stdout is not None
        assert server.stderr is not None
        [(address, port)] = re.findall(r"(http://127\.0\.0\.1:(\d+)/)", server.stdout.readline())
        try:
            for _ in range(250):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", int(port)), timeout=60))
                connection.sendall(HALF)
            assert [ask(address)[0] for _ in range(3)] == [200, 200, 200]
        finally:
            server.terminate()
        assert server.stderr.read() == ""
    assert server.returncode == 0


def test_a_token_from_the_environment_is_not_printed() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "hotloop", "top", "--web", "--port", "0", "--example", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HOTLOOP_TOKEN": TOKEN},
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        [address] = re.findall(r"http://127\.0\.0\.1:\d+/", line)
        assert "in a browser, put the token itself there" in line
        assert ask(address)[0] == 401
        assert ask(address, f"/?token={TOKEN}")[0] == 303
        server.terminate()
        assert TOKEN not in line + server.stdout.read()


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def says(self, what: bytes) -> None:
        self._writer.write(what)

    async def hears(self) -> bytes:
        """The first line of what comes; nothing where the connection was ended."""
        try:
            return (await asyncio.wait_for(self._reader.readline(), 60)).strip()
        except ConnectionError:
            return b""

    async def hears_all(self) -> bytes:
        """All that comes until the connection is ended."""
        try:
            return await asyncio.wait_for(self._reader.read(), 60)
        except ConnectionError:
            return b""

    async def goes(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


@asynccontextmanager
async def served(
    door: Door, *, token: str | None = None, feed: Feed | None = None
) -> AsyncIterator[Callable[..., Awaitable[Client]]]:
    """A server with such a door, and how one comes to it."""
    feed = feed or Feed(lambda: Reading(0.0, Host()))
    clients = []
    with closing(socket.create_server(("127.0.0.1", 0))) as bound:

        async def comes(said: bytes = b"", address: str = "127.0.0.1") -> Client:
            port = bound.getsockname()[1]
            clients.append(Client(*await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))))
            clients[-1].says(said)
            return clients[-1]

        async with listening(application(feed, Gate(token, loopback=True), heartbeat=0.05), bound, door):
            yield comes
            feed.close()
            for client in clients:
                await client.goes()


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 120))  # type: ignore[arg-type]


def test_a_connection_must_ask_soon_and_ask_again_but_may_listen_for_long() -> None:
    async def scene() -> None:
        async with served(Door(first=0.3, following=0.1)) as comes:
            listener = await comes(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            silent, slow, asked = [await comes() for _ in range(3)]
            asked.says(HALF + REST)
            assert await asked.hears() == b"HTTP/1.1 200 OK"
            for byte in HALF[:20]:
                slow.says(bytes([byte]))
                await asyncio.sleep(0.03)
            assert await slow.hears() == await silent.hears() == b""
            assert b"</html>" in await asked.hears_all()
            beats = 0
            while beats < 5:
                beats += await listener.hears() == b"event: beat"

    play(scene)


def test_who_is_one_too_many_takes_the_place_of_the_stranger_who_has_waited_longest() -> None:
    async def scene() -> None:
        async with served(Door(most=3), token=TOKEN) as comes:
            owner = await comes(HALF + f"host\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            assert await owner.hears() == b"HTTP/1.1 200 OK"
            first = await comes(HALF + REST)
            assert await first.hears() == b"HTTP/1.1 401 Unauthorized"
            second, third = [await comes(HALF) for _ in range(2)]
            assert b"HTTP/1.1 401" not in await first.hears_all()  # only the rest of its answer
            second.says(REST)
            third.says(REST)
            assert await second.hears() == await third.hears() == b"HTTP/1.1 401 Unauthorized"
            for _ in range(20):
                await comes(HALF)
            owner.says(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b"HTTP/1.1 401 Unauthorized" in await owner.hears_all()

    play(scene)


def test_one_address_cannot_take_the_room_of_the_others() -> None:
    async def scene() -> None:
        async with served(Door(most=8, of_one=4)) as comes:
            other = await comes(HALF, address="127.0.0.2")
            for _ in range(20):
                await comes(HALF)
            other.says(REST)
            assert await other.hears() == b"HTTP/1.1 200 OK"

    play(scene)


def test_an_error_of_ours_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    async def scene() -> None:
        feed = Feed(lambda: Reading(0.0, Host()))
        feed.take(Reading(0.0, Host()))
        feed.hour = broken  # type: ignore[method-assign, assignment]
        async with served(Door(), feed=feed) as comes:
            for _ in range(3):
                asking = await comes(b"GET /api/readings?history=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert await asking.hears() == b"HTTP/1.1 500 Internal Server Error"

    play(scene)
    assert capfd.readouterr().err.count("Traceback") == 1
