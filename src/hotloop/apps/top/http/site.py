"""An aiohttp application behind a `Gate` and a `Door`: what is answered to whom, and under which headers."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from importlib.resources import files
from typing import Any, Literal

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hotloop.apps.top.http.access import Gate
from hotloop.apps.top.http.door import Door

HEADERS = {
    # Scripts come from files alone, and the browser itself refuses text that would become markup.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "hotloop",
}
STRANGER = (
    "A token is needed.\n"
    "In a browser: paste the whole address that `hotloop {verb} --web` printed; where it has no token, add "
    "?token=TOKEN.\n"
    "For a program: send the header `Authorization: Bearer TOKEN`.\n"
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(
    verb: str,
    gate: Gate,
    gets: Mapping[str, Handler],
    posts: Mapping[str, Handler] | None = None,
    *,
    same_site: Literal["Strict", "Lax"] = "Strict",
    longest: int = 1 << 20,
) -> web.Application:
    """The routes of a page. `posts` are all that changes or runs something; `longest` bytes are read of a request."""
    posts = posts or {}
    app = web.Application(middlewares=[_guard(verb, gate, set(gets), bool(posts), same_site)], client_max_size=longest)
    app.on_response_prepare.append(_headers)
    for path, handler in gets.items():
        app.router.add_get(path, handler, allow_head=False)
    for path, handler in posts.items():
        app.router.add_post(path, handler)
    return app


def _guard(verb: str, gate: Gate, pages: set[str], acts: bool, same_site: Literal["Strict", "Lax"]) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        reads = not acts or request.method in {"GET", "HEAD"}
        refusal = gate.refusal(request.headers, reads=reads)
        if refusal is not None:
            raise web.HTTPForbidden(text=refusal)
        if gate.has_token(request.query.get("token")) and request.path in pages:
            return _welcome(request, gate, same_site)
        if not gate.knows(request.headers, request.cookies.get(_cookie(request))):
            raise web.HTTPUnauthorized(text=STRANGER.format(verb=verb), headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return guard


def _welcome(request: web.Request, gate: Gate, same_site: Literal["Strict", "Lax"]) -> web.Response:
    """Change the token for a cookie, so that it stays in no address bar, history or bookmark."""
    rest = [(name, value) for name, value in request.query.items() if name != "token"]
    response = web.Response(status=303, headers={"Location": str(request.rel_url.with_query(rest))})
    response.set_cookie(_cookie(request), gate.session, path="/", httponly=True, samesite=same_site)
    return response


@asynccontextmanager
async def listening(app: web.Application, bound: socket.socket, door: Door | None = None) -> AsyncIterator[None]:
    """Answer on a socket until the block ends, and write nothing that a stranger sent to the terminal."""
    door = door or Door()
    app.middlewares.insert(0, _through(door))
    logger = logging.Logger("hotloop.apps.top.http")  # of nobody else: no setting of the program at large is touched
    logger.addFilter(_Once())
    # No log of requests either: it would hold the token.
    runner = web.AppRunner(app, access_log=None, logger=logger, shutdown_timeout=1)
    await runner.setup()
    assert runner.server is not None
    accepting = asyncio.create_task(door.open(bound, runner.server))
    try:
        yield
    finally:
        accepting.cancel()
        await asyncio.wait([accepting])
        await runner.cleanup()


def _through(door: Door) -> Any:
    """Tells the door who is being answered."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        visit = door.visit(request.transport)
        with nullcontext() if visit is None else visit.asks():
            return await handler(request)

    return middleware


class _Once(logging.Filter):
    """Lets an error of ours through the first time, and what is wrong with a request never: both can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[type[BaseException]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or isinstance(error, HttpProcessingError) or type(error) in self._told:
            return error is None
        self._told.add(type(error))
        return True


async def _headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def asset(package: str, folder: str, name: str, kind: str) -> Handler:
    """A text file in a folder of a package."""
    text = files(package).joinpath(folder, name).read_text(encoding="utf-8")

    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type=kind)

    return handler


def _cookie(request: web.Request) -> str:
    """A name of its own for each port: browsers do not tell the ports of a machine apart."""
    name = request.get_extra_info("sockname")
    return f"hotloop-{name[1] if name else 0}"
