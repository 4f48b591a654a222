"""`hotloop learn --web`: the lessons in a browser on this machine, behind a token, since they run code."""

import asyncio
import html
import secrets
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from hotloop.apps.learn.learner_progress import data_folder
from hotloop.apps.top.http.access import Gate
from hotloop.apps.top.http.listening import address_of, bound, needing_extra, until_ended
from hotloop.errors import HotloopError
from hotloop.files.cache import make_private
from hotloop.files.whole import write_whole

HOST = "127.0.0.1"
LETTER = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={address}">
<title>hotloop learn</title>
<p><a href="{address}">hotloop learn</a></p>
"""


def serve(*, port: int = 8081, ready: Callable[[str], None] | None = None, browser: bool = True) -> None:
    """Serve the lessons until Ctrl-C or SIGTERM. `ready` is given the address to open, once it can be opened.

    The address holds a token: who has it can run code with the rights of this person. Port 0 is any free one.
    """
    letter: list[Path] = []

    def announce(address: str) -> None:
        (ready or print)(address)
        if browser:
            letter.extend(_open(address))

    try:
        asyncio.run(until_ended(serving(port=port), announce))
    finally:
        for file in letter:
            file.unlink(missing_ok=True)


@asynccontextmanager
async def serving(*, port: int = 8081) -> AsyncIterator[str]:
    """The same inside an event loop: the address, served until the block ends."""
    server, site = needing_extra("hotloop.apps.learn.server"), needing_extra("hotloop.apps.top.http.site")
    with bound(HOST, port) as listener:
        token = secrets.token_urlsafe(24)
        school = server.School()
        async with site.listening(server.application(school, Gate(token, loopback=True)), listener):
            try:
                yield address_of(HOST, listener.getsockname()[1], token)
            finally:
                school.close()


def _open(address: str) -> list[Path]:
    """Show the address in a browser, through a file that only this person can read.

    The arguments of a browser's process can be read by everyone on a machine, and the token must not be.
    """
    file = data_folder() / "learn.html"
    with suppress(OSError, HotloopError, webbrowser.Error):  # the address was printed
        if type(webbrowser.get()) is webbrowser.GenericBrowser:  # one that would take over this terminal, such as lynx
            return []
        make_private(file.parent)
        write_whole(file, LETTER.format(address=html.escape(address)).encode(), mode=0o600)
        threading.Thread(target=webbrowser.open, args=(file.absolute().as_uri(),), daemon=True).start()
        return [file]
    return []
