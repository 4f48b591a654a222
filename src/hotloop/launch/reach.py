"""The place where nodes meet: whether its port is free here, and whether it can be reached from here. No torch here."""

import errno
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from hotloop.errors import BadArgument, HotloopError
from hotloop.printing.text import duration, printable

PORT = 29500  # torchrun's own default
ATTEMPT = 2.0  # seconds for one connection


class Unreachable(HotloopError, ConnectionError):
    """The node at which all others meet does not answer."""

    exit_code = 4


class PortTaken(HotloopError, OSError):
    """The port of the rendezvous belongs to another program."""

    exit_code = 4


@dataclass(frozen=True)
class Endpoint:
    """A host and a port.

    >>> Endpoint.parse("node-0:29511"), str(Endpoint.parse("node-0")), Endpoint.parse("[::1]:80").host
    (Endpoint(host='node-0', port=29511), 'node-0:29500', '::1')
    """

    host: str
    port: int = PORT

    @classmethod
    def parse(cls, words: str, option: str = "--master") -> "Endpoint":
        bracketed, _, after = words.removeprefix("[").partition("]") if words.startswith("[") else ("", "", "")
        host, _, port = (bracketed, "", after.removeprefix(":")) if bracketed else words.partition(":")
        if not host or not (port or str(PORT)).isdecimal() or not 0 < int(port or PORT) < 2**16:
            raise BadArgument(
                f"{option} {printable(words)!r} is not a host and a port",
                fix=f"give both, such as {option} node-0:{PORT}",
            )
        return cls(host, int(port or PORT))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def brief(seconds: float) -> str:
    """A length of time without a second half that says nothing.

    >>> brief(300), brief(90)
    ('5 min', '1 min 30 s')
    """
    return duration(seconds).removesuffix(" 0 s")


def is_here(host: str) -> bool:
    """Whether a host is this machine: one of its addresses can be bound to."""
    for family, kind, protocol, _, address in _resolved(host):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0, *address[2:]))
            except OSError:
                continue
            return True
    return False


def _resolved(host: str) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except OSError:
        return []


def answers(endpoint: Endpoint) -> bool:
    """Whether something listens there now."""
    return _why_not(endpoint) is None


def must_be_free(endpoint: Endpoint, option: str) -> None:
    """Refuse a port of this machine that another program listens on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        if os.name != "nt":  # there it would share the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", endpoint.port))
            return
        except PermissionError:
            what, fix = f"port {endpoint.port} needs rights that this process lacks", "choose a port of 1024 or above"
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            what, fix = (
                port_taken(endpoint.port),
                f"end it, or choose another port on every node: {another(endpoint, option)}",
            )
    raise PortTaken(f"nodes cannot meet at {endpoint}: {what}", fix=fix)


def another(endpoint: Endpoint, option: str) -> str:
    return f"{option} {Endpoint(endpoint.host, endpoint.port + 1)}"


def port_taken(port: int) -> str:
    """Words for a port in use, with the process where the system tells it."""
    try:
        listening = [each for each in psutil.net_connections("tcp") if each.pid and each.status == "LISTEN"]
        owners = [each.pid for each in listening if each.laddr and each.laddr.port == port]
        by = f" by process {owners[0]} ({printable(psutil.Process(owners[0]).name())})" if owners else ""
    except (psutil.Error, OSError):  # another user's, or a system that does not tell
        by = ""
    return f"port {port} is taken on this host{by or ' by another program'}"


def wait_for(endpoint: Endpoint, patience: float, tell: Callable[[str], None], *, every: float = 10.0) -> None:
    """Return once something listens there; a line at first and `every` so many seconds, an error after `patience`."""
    begun = time.monotonic()
    told = -every
    while (why := _why_not(endpoint)) is not None:
        waited = time.monotonic() - begun
        if waited >= patience:
            raise Unreachable(
                f"{endpoint} did not answer within {brief(patience)}: {why}",
                fix="start node 0 there, let its port through the firewall, and check that "
                f"`getent hosts {printable(endpoint.host)}` gives an address that this machine can reach; "
                "`--join-timeout 30min` waits longer",
            )
        if waited - told >= every:
            told = waited
            tell(f"waiting for {endpoint}, {waited:.0f} s of {brief(patience)}: {why}")
        time.sleep(min(1.0, max(0.0, patience - waited)))


def _why_not(endpoint: Endpoint) -> str | None:
    """Why a connection fails; None where one is made."""
    try:
        socket.create_connection((endpoint.host, endpoint.port), ATTEMPT).close()
    except socket.gaierror:
        return f"no address is known for {printable(endpoint.host)}"
    except TimeoutError:
        return "no answer (a firewall, or a host that is down)"
    except ConnectionRefusedError:
        return "the host answers, but nothing listens on that port yet"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None
