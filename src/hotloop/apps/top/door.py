"""The connections of a server: how many there may be, how long each may take to ask, and who makes room for whom."""

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

MOST_CONNECTIONS = 128  # at one time: with what else is open, within the 256 files that macOS allows a process
OF_ONE = 64  # from one address
FIRST = 10.0  # seconds in which a connection must have asked for something
NEXT = 60.0  # seconds in which it must have taken the answer, and asked again
PAUSE = 0.1  # seconds after a newcomer who could not be let in
FULL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # the system has room for fewer than we have


class Connection(asyncio.Protocol):
    """A connection. All it receives is handed on to the protocol behind it."""

    def __init__(self, door: "Door", inner: Any) -> None:
        self.known = False  # whether it has been given something that not everyone gets
        self.asking = False  # whether it is being answered now
        self.address = ""
        self._door = door
        self._inner = inner
        self._transport: asyncio.Transport
        self._deadline: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.address = _network(transport.get_extra_info("peername"))
        self._transport = cast(asyncio.Transport, transport)
        self._deadline = asyncio.get_running_loop().call_later(self._door.first, self.end)
        self._inner.connection_made(transport)
        self._door.enter(transport, self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._door.leave(self._transport)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        more: bool | None = self._inner.eof_received()
        return more

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    @contextmanager
    def asks(self) -> Iterator[None]:
        """While it is answered, it may take its time: the answer may be a stream without an end."""
        self._deadline.cancel()
        self.asking = True
        try:
            yield
            self.known = True
        finally:
            self.asking = False
            if not self._transport.is_closing():
                self._deadline = asyncio.get_running_loop().call_later(self._door.next, self.end)

    def end(self) -> None:
        """Close it, whatever has not been sent yet."""
        self._deadline.cancel()
        self._door.leave(self._transport)
        self._transport.abort()


class Door:
    """Lets everyone in: whoever is one too many takes the place of the stranger who has kept it waiting longest.

    So nobody can shut others out by opening connections and saying nothing. Those who were answered before go last,
    and those who are being answered never: the server limits the only answers that last.
    """

    def __init__(
        self, *, most: int = MOST_CONNECTIONS, of_one: int = OF_ONE, first: float = FIRST, following: float = NEXT
    ) -> None:
        self.first = first
        self.next = following
        self._most = most
        self._of_one = of_one
        self._visits: dict[asyncio.BaseTransport, Connection] = {}  # the oldest first

    async def open(self, bound: socket.socket, protocol: Callable[[], Any]) -> None:
        """Accept connections for ever. One at a time: asyncio's own server reports every one that it cannot take."""
        loop = asyncio.get_running_loop()
        bound.setblocking(False)
        while True:
            try:
                accepted, _ = await loop.sock_accept(bound)
                await loop.connect_accepted_socket(lambda: Connection(self, protocol()), accepted)
            except OSError as error:
                if error.errno in FULL:
                    self._most = max(1, len(self._visits) * 3 // 4)
                    for _ in range(len(self._visits) - self._most):
                        self._make_room(list(self._visits.values()))
                await asyncio.sleep(PAUSE)

    def enter(self, transport: asyncio.BaseTransport, visit: Connection) -> None:
        others = list(self._visits.values())
        neighbours = [other for other in others if other.address == visit.address]
        self._visits[transport] = visit
        if len(neighbours) >= self._of_one:
            self._make_room(neighbours)
        elif len(others) >= self._most:
            self._make_room(others)

    def leave(self, transport: asyncio.BaseTransport) -> None:
        self._visits.pop(transport, None)

    def visit(self, transport: asyncio.BaseTransport | None) -> Connection | None:
        """The visit of a connection; None where it has ended."""
        return None if transport is None else self._visits.get(transport)

    def _make_room(self, visits: list[Connection]) -> None:
        idle = [visit for visit in visits if not visit.asking]
        if idle:
            min(idle, key=lambda visit: visit.known).end()  # the first of equals


def _network(peer: Any) -> str:
    """What counts as one address: of IPv6, the half that a provider gives to one customer.

    >>> _network(("10.0.0.7", 50312)), _network(("2001:db8:1:2:3:4:5:6", 50312, 0, 0))
    ('10.0.0.7', '2001:db8:1:2::')
    """
    address = ipaddress.ip_address(str(peer[0]).partition("%")[0]) if peer else ipaddress.IPv4Address(0)
    return str(ipaddress.ip_network((address, 64), strict=False)[0] if address.version == 6 else address)
