"""The web application behind `hotloop top --web`: the page, its events, `/api/readings` and `/metrics`."""

import asyncio
import json

from aiohttp import web

from hotloop.apps.top.exporter import CONTENT_TYPE, metrics
from hotloop.apps.top.feed import Feed
from hotloop.apps.top.http.access import Gate
from hotloop.apps.top.http.site import Handler, asset
from hotloop.apps.top.http.site import application as site_of
from hotloop.files.whole import finite

LISTENERS = 32  # open pages at one time
HEARTBEAT = 15.0  # seconds without a sample after which a listener hears that the server is alive
PATIENCE = 60.0  # seconds in which a listener must take what it was sent
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


def application(feed: Feed, gate: Gate, *, listeners: int = LISTENERS, heartbeat: float = HEARTBEAT) -> web.Application:
    """The routes of the page, all of them GET alone."""
    site = _Site(feed, listeners, heartbeat)
    return site_of("top", gate, site.routes)


class _Site:
    def __init__(self, feed: Feed, listeners: int, heartbeat: float) -> None:
        self.feed = feed
        self.free = listeners
        self.heartbeat = heartbeat
        self.routes: dict[str, Handler] = {
            **{path: asset("hotloop.apps.top", "page", name, kind) for path, (name, kind) in ASSETS.items()},
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
                async with asyncio.timeout(PATIENCE):
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
