"""`hotloop top --web`: the page, its events, `/api/readings` and `/metrics`, on this machine or behind a token."""

import ipaddress
import secrets
import socket
from collections.abc import Callable
from importlib import import_module
from urllib.parse import quote

from hotloop.apps.top.access import Gate
from hotloop.apps.top.feed import Feed
from hotloop.errors import BadArgument, HotloopError
from hotloop.monitor.reading import Reading
from hotloop.printing.text import printable

SHORTEST = 8  # characters of a token that a person makes up


def serve(
    read: Callable[[], Reading],
    *,
    ready: Callable[[str], None],
    host: str = "127.0.0.1",
    port: int = 8080,
    token: str | None = None,
    every: float = 1.0,
) -> None:
    """Serve the page until Ctrl-C or SIGTERM. `ready` is given the address to open, once it can be opened.

    `read` is called every so many seconds, always in the same thread. Where `host` is not this machine alone
    (loopback), nobody is answered without a token; where none is given, one is made. It is part of the address. Port 0
    is any free one.
    """
    if token is not None and (len(token) < SHORTEST or not all("!" <= char <= "~" for char in token)):
        raise BadArgument(
            "this token is too easily guessed, or cannot be sent",
            fix=f"leave it out, and one is made; or take {SHORTEST} or more ASCII characters without a space",
        )
    try:
        server = import_module("hotloop.apps.top.server")
    except ModuleNotFoundError as error:
        raise HotloopError(
            f"the web page needs a package that is not installed: {error.name}", fix="pip install 'hotloop[web]'"
        ) from error
    with _listening(host, port) as listener:
        found, port = listener.getsockname()[:2]
        loopback = ipaddress.ip_address(found).is_loopback
        if token is None and not loopback:
            token = secrets.token_urlsafe(24)
        address = address_of(found, port, token)
        app = server.application(Feed(read, every=every), Gate(token, loopback=loopback))
        server.run(app, listener, ready=lambda _: ready(address))


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens there, or the reason in words why there can be none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        return socket.create_server(where[:2], family=family)
    except (OSError, ValueError) as error:  # ValueError: not a name at all
        raise BadArgument(
            f"cannot listen on {printable(host)!r}, port {port}: {getattr(error, 'strerror', None) or error}",
            fix="take another `--port`, above 1023 or 0 for any that is free; `--bind 127.0.0.1` is for this machine "
            "alone, `--bind 0.0.0.0` for all its networks, behind a token",
        ) from error


def address_of(address: str, port: int, token: str | None) -> str:
    """What to open in a browser.

    >>> address_of("::1", 8080, None), address_of("10.0.0.7", 8080, "swordfish")
    ('http://[::1]:8080/', 'http://10.0.0.7:8080/?token=swordfish')
    """
    ip = ipaddress.ip_address(address)
    name = socket.gethostname() if ip.is_unspecified else f"[{address}]" if ip.version == 6 else address
    return f"http://{name}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")
