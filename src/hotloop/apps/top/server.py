"""The web application behind `hotloop top --web`: the page, its events, `/api/readings` and `/metrics`."""

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from hotloop.apps.top.access import Gate
from hotloop.apps.top.exporter import CONTENT_TYPE, metrics
from hotloop.apps.top.feed import Feed
from hotloop.records.files import finite

LISTENERS = 32  # open pages at one time
HEARTBEAT = 15.0  # seconds without a sample after which a listener hears that the server is alive
LISTENER_PATIENCE = 60.0  # seconds in which a listener must take what it was sent
RETRY = 2000  # milliseconds after which a browser connects again
ASSETS = {  # address: file, kind
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/parts.js": ("parts.js", "text/javascript"),
    "/plot.js": ("plot.js", "text/javascript"),
    "/series.js": ("series.js", "text/javascript"),
    "/words.js": ("words.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

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
    "In a browser: paste the whole address that `hotloop top --web` printed; where it has no token, add "
    "?token=TOKEN.\n"
    "For a program: send the header `Authorization: Bearer TOKEN`.\n"
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(feed: Feed, gate: Gate, *, listeners: int = LISTENERS, heartbeat: float = HEARTBEAT) -> web.Application:
    """The routes of the page behind the gate, all of them GET alone; the feed reads while they are served."""
    routes = _Site(feed, listeners, heartbeat).routes
    app = web.Application(middlewares=[_guard(gate, set(routes))])
    app.on_response_prepare.append(_headers)

    async def begin(_: web.Application) -> None:
        feed.start()

    async def end(_: web.Application) -> None:
        feed.close()

    app.on_startup.append(begin)
    app.on_shutdown.append(end)
    for path, handler in routes.items():
        app.router.add_get(path, handler, allow_head=False)
    return app


class _Site:
    def __init__(self, feed: Feed, listeners: int, heartbeat: float) -> None:
        self.feed = feed
        self.free = listeners
        self.heartbeat = heartbeat
        self.routes: dict[str, Handler] = {
            **{path: _asset(name, kind) for path, (name, kind) in ASSETS.items()},
            "/events": self.events,
            "/api/readings": self.readings,
            "/metrics": self.metrics,
        }

    async def readings(self, request: web.Request) -> web.Response:
        sample = self.feed.latest
        if sample is None:
            raise web.HTTPServiceUnavailable(text="Nothing has been read yet.", headers={"Retry-After": "1"})
        told = finite(sample.to_json())
        if request.query.get("history", "0") not in {"", "0"}:
            told["history"] = self.feed.hour()
        return web.json_response(told)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=metrics(self.feed.latest), headers={"Content-Type": CONTENT_TYPE})

    async def events(self, request: web.Request) -> web.StreamResponse:
        if not self.free:
            raise web.HTTPServiceUnavailable(text="Too many pages are open.", headers={"Retry-After": "10"})
        self.free -= 1
        try:
            return await self._tell(request)
        finally:
            self.free += 1

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        told = 0
        beginning = json.dumps({"every": self.feed.every, **self.feed.hour()}, separators=(",", ":"))
        # A browser that comes back says what it had last, but the whole hour is small, and right after any pause.
        chunk = f"retry: {RETRY}\nevent: history\ndata: {beginning}\n\n"
        try:
            while True:
                async with asyncio.timeout(LISTENER_PATIENCE):
                    await response.write(chunk.encode())
                sample = await self.feed.after(told, self.heartbeat)
                if self.feed.closed:
                    return response
                if sample is None:
                    chunk = "event: beat\ndata: {}\n\n"
                else:
                    told = sample.number
                    chunk = f"id: {told}\nevent: sample\ndata: {sample.encoded}\n\n"
        except (ConnectionError, TimeoutError):
            return response  # it has gone, or it takes nothing any more


def _asset(name: str, kind: str) -> Handler:
    """A text file of the page."""
    text = files("hotloop.apps.top").joinpath("page", name).read_text(encoding="utf-8")

    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type=kind)

    return handler


def _guard(gate: Gate, pages: set[str]) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = gate.refusal(request.headers)
        if refusal is not None:
            raise web.HTTPForbidden(text=refusal)
        if gate.has_token(request.query.get("token")) and request.path in pages:
            return _welcome(request, gate)
        if not gate.knows(request.headers, request.cookies.get(_cookie(request))):
            raise web.HTTPUnauthorized(text=STRANGER, headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return guard


def _welcome(request: web.Request, gate: Gate) -> web.Response:
    """Change the token for a cookie, so that it stays in no address bar, history or bookmark."""
    rest = [(name, value) for name, value in request.query.items() if name != "token"]
    response = web.Response(status=303, headers={"Location": str(request.rel_url.with_query(rest))})
    response.set_cookie(_cookie(request), gate.session, path="/", httponly=True, samesite="Strict")
    return response


def run(app: web.Application, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; requests are logged nowhere, for a log would hold the token."""
    web.run_app(app, sock=listener, print=ready, access_log=None, logger=quiet_log(), shutdown_timeout=1)


def quiet_log() -> logging.Logger:
    """A log for our own errors; what is wrong with a request is not among them."""
    logger = logging.Logger("hotloop.apps.top")  # of nobody else: no setting of the program at large is touched
    logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
    return logger


async def _headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


def _cookie(request: web.Request) -> str:
    """A name of its own for each port: browsers do not tell the ports of a machine apart."""
    name = request.get_extra_info("sockname")
    return f"hotloop-{name[1] if name else 0}"
