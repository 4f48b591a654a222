"""Where a page listens: a socket and its address, or the reason in words; and how long: until Ctrl-C or SIGTERM."""

import asyncio
import errno
import ipaddress
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from importlib import import_module
from types import ModuleType
from urllib.parse import quote

from hotloop.errors import BadArgument, HotloopError
from hotloop.printing.text import printable

SHORTEST = 8  # characters of a token that a person makes up


async def until_ended(site: AbstractAsyncContextManager[str], ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. `ready` is given the address to open, once it can be opened."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Only the main thread of a program may do this, and not on Windows, where Ctrl-C is an exception.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with site as address:
        ready(address)
        await stop.wait()


def check_token(token: str | None) -> None:
    """A token that a person makes up must be hard to guess, and must fit in an address."""
    if token is not None and (len(token) < SHORTEST or not all("!" <= char <= "~" for char in token)):
        raise BadArgument(
            "this token is too easily guessed, or cannot be sent",
            fix=f"leave it out, and one is made; or take {SHORTEST} or more ASCII characters without a space",
        )


def needing_extra(module: str) -> ModuleType:
    """A module that is built on packages which the rest of hotloop does without."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise HotloopError(
            f"the web page needs a package that is not installed: {error.name}", fix="pip install 'hotloop[web]'"
        ) from error


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there, or the reason in words why there can be none."""
    if not 0 <= port <= 65535:
        raise BadArgument(f"there is no port {port}", fix="choose from 1024 to 65535, or 0 for any that is free")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM) if host else []
    except (OSError, ValueError):  # no such name; not a name at all
        found = []
    if not found:
        raise _no_such_host(host)
    family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    try:
        return socket.create_server(where[:2], family=family)
    except OSError as error:
        raise _explained(error, host, port) from error


def _explained(error: OSError, host: str, port: int) -> HotloopError:
    if error.errno == errno.EADDRINUSE:
        other = port + 1 if port < 65535 else port - 1
        return HotloopError(
            f"port {port} is taken by another program",
            fix=f"choose another, such as `--port {other}`, or `--port 0` for any that is free",
        )
    if error.errno in {errno.EACCES, errno.EPERM}:
        return HotloopError(f"you may not listen on port {port}", fix="choose one above 1023, such as `--port 8080`")
    if error.errno == errno.EADDRNOTAVAIL:
        return _no_such_host(host)
    return HotloopError(
        f"cannot listen on {printable(host)}, port {port}: {error.strerror or error}",
        fix="choose another `--bind` or `--port`",
    )


def _no_such_host(host: str) -> BadArgument:
    return BadArgument(
        f"this machine has no address {printable(host)!r}",
        fix="`--bind 127.0.0.1` is for this machine alone, `--bind 0.0.0.0` for all its networks, behind a token",
    )


def address_of(address: str, port: int, token: str | None) -> str:
    """What to open in a browser.

    >>> address_of("::1", 8080, None), address_of("10.0.0.7", 8080, "swordfish")
    ('http://[::1]:8080/', 'http://10.0.0.7:8080/?token=swordfish')
    """
    ip = ipaddress.ip_address(address)
    name = socket.gethostname() if ip.is_unspecified else f"[{address}]" if ip.version == 6 else address
    return f"http://{name}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")
