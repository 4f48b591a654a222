"""`hotloop top --web`: the page, its events, `/api/readings` and `/metrics`, on this machine or behind a token."""

import asyncio
import ipaddress
import math
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from hotloop.apps.top.access import Gate
from hotloop.apps.top.advice import Advisor
from hotloop.apps.top.feed import HOUR, Feed
from hotloop.apps.top.listening import address_of, bound, check_token, needing_extra, until_ended
from hotloop.errors import BadArgument
from hotloop.monitor.reading import Reading


def serve(
    read: Callable[[], Reading],
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    token: str | None = None,
    every: float = 1.0,
    ready: Callable[[str], None] | None = None,
    advisor: Advisor | None = None,
) -> None:
    """Serve the page until Ctrl-C or SIGTERM. `ready` is given the address to open, once it can be opened.

    `read` is called every so many seconds, always in the same thread, and `advisor` is shown there what it read. Where
    `host` is not this machine alone (loopback), nobody is answered without a token; where none is given, one is made.
    It is part of the address. Port 0 is any free one.
    """
    if not (math.isfinite(every) and 0.1 <= every <= HOUR):
        raise BadArgument(f"a sample every {every} s", fix="choose from 0.1 to 3600 seconds")
    feed = Feed(read, every=every, advisor=advisor)
    asyncio.run(until_ended(serving(feed, host=host, port=port, token=token), ready or _announce))


@asynccontextmanager
async def serving(
    feed: Feed, *, host: str = "127.0.0.1", port: int = 8080, token: str | None = None
) -> AsyncIterator[str]:
    """The same inside an event loop: the address, served until the block ends."""
    check_token(token)
    server = needing_extra("hotloop.apps.top.server")
    with bound(host, port) as listener:
        address, port = listener.getsockname()[:2]
        loopback = ipaddress.ip_address(address).is_loopback
        if token is None and not loopback:
            token = secrets.token_urlsafe(24)
        app = server.application(feed, Gate(token, loopback=loopback))
        async with server.listening(app, listener):
            feed.start()
            try:
                yield address_of(address, port, token)
            finally:
                feed.close()


def _announce(address: str) -> None:
    print(f"hotloop top: {address} (Ctrl-C ends it)", flush=True)
