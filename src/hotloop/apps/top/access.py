"""Who may see the page: this machine's own browser without a word, anyone else with the token."""

import ipaddress
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit


class Gate:
    """Judges a request by its headers.

    On loopback, a request must be addressed to this machine by a name that only this machine answers to: a page from
    elsewhere whose own name was made to point here (DNS rebinding) carries that name in `Host`. What other origins ask
    for in a browser is refused everywhere. With a token, one must bring it, or the cookie that it was changed for.
    """

    def __init__(self, token: str | None, *, loopback: bool) -> None:
        self.token = token
        self.loopback = loopback
        self.session = secrets.token_urlsafe(32)  # the cookie: worth nothing once this server has ended

    def refusal(self, headers: Mapping[str, str]) -> str | None:
        """Why a request is refused whoever sends it; None where it is not."""
        host = headers.get("Host", "")
        if self.loopback and not is_local(host):
            return "This server answers only to the names localhost, 127.0.0.1 and [::1]."
        origin = headers.get("Origin")
        if origin is not None and origin.lower() != f"http://{host}".lower():
            return "This server answers no other origin."
        followed_link = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
        if headers.get("Sec-Fetch-Site", "none") not in {"none", "same-origin"} and not followed_link:
            return "This server answers no other origin."
        return None

    def has_token(self, offered: str | None) -> bool:
        """Whether that is the token; takes equally long whatever it is."""
        return self.token is not None and offered is not None and _same(offered, self.token)

    def knows(self, headers: Mapping[str, str], cookie: str | None) -> bool:
        """Whether a request has what it takes to be answered."""
        kind, _, bearer = headers.get("Authorization", "").partition(" ")
        return (
            self.token is None
            or (cookie is not None and _same(cookie, self.session))
            or (kind.lower() == "bearer" and self.has_token(bearer.strip()))
        )


def is_local(host: str) -> bool:
    """Whether a `Host` header can only mean this machine, whatever its port.

    >>> is_local("localhost:8080"), is_local("[::1]"), is_local("127.0.0.1.example.org:8080")
    (True, True, False)
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if any(char in host for char in "/?#@"):  # no host at all, but urlsplit would find one in it
        return False
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _same(one: str, other: str) -> bool:
    return secrets.compare_digest(one.encode(errors="surrogatepass"), other.encode(errors="surrogatepass"))
