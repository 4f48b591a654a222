"""The place where nodes meet: whether its port is free here, and whether it can be reached from here. No torch here."""

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

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
    def parse(cls, words: str) -> "Endpoint":
        try:
            parts = urlsplit(f"//{words}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or port == 0:
            raise BadArgument(
                f"--master {printable(words)!r} is not a host and a port",
                fix=f"give both, such as --master node-0:{PORT}",
            )
        return cls(host, port or PORT)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_here(host: str) -> bool:
    """Whether a host is this machine: one of its addresses can be bound to."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False


def must_be_free(endpoint: Endpoint) -> None:
    """Refuse a port of this machine that cannot be listened on, with the process that has it where the system tells."""
    try:
        socket.create_server(("", endpoint.port)).close()
    except OSError as error:
        raise PortTaken(
            f"nodes cannot meet at {endpoint}: port {endpoint.port} of this host cannot be listened on:"
            f" {(error.strerror or str(error)).lower()}{_owner(endpoint.port)}",
            fix=f"end it, or choose another port on every node: --master {Endpoint(endpoint.host, endpoint.port + 1)}",
        ) from None


def _owner(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):  # another user's, or a system that does not tell
        for each in psutil.net_connections("tcp"):
            if each.pid and each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port:
                return f" by process {each.pid} ({printable(psutil.Process(each.pid).name())})"
    return ""


def wait_for(endpoint: Endpoint, patience: float, tell: Callable[[str], None], *, every: float = 10.0) -> None:
    """Return once something listens there; a line at first and `every` so many seconds, an error after `patience`."""
    begun = time.monotonic()
    told = -every
    while (why := _why_not(endpoint)) is not None:
        waited = time.monotonic() - begun
        if waited >= patience:
            raise Unreachable(
                f"{endpoint} did not answer within {duration(patience)}: {why}",
                fix="start node 0 there, let its port through the firewall, and check that "
                f"`getent hosts {printable(endpoint.host)}` gives an address that this machine can reach; "
                "`--join-timeout 30min` waits longer",
            )
        if waited - told >= every:
            told = waited
            tell(f"waiting for {endpoint}, {waited:.0f} s of {duration(patience)}: {why}")
        time.sleep(min(1.0, max(0.0, patience - waited)))


def _why_not(endpoint: Endpoint) -> str | None:
    """Why a connection fails; None where one is made."""
    try:
        socket.create_connection((endpoint.host, endpoint.port), ATTEMPT).close()
    except socket.gaierror:
        return f"no address is known for {printable(endpoint.host)}"
    except TimeoutError:
        return "no answer (a firewall, or a host that is down)"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None
