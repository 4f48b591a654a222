"""The web application behind `hotloop learn --web`: pages to read, and what they run, which is asked for by POST."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from aiohttp import web

from hotloop.apps.learn import views
from hotloop.apps.learn.checking import check
from hotloop.apps.learn.exercise import Exercise, exercise
from hotloop.apps.learn.learner_progress import LearnerProgress, data_folder, draft_file
from hotloop.apps.learn.lesson import Lesson, lesson
from hotloop.apps.learn.quiz import is_right_apart, question
from hotloop.apps.learn.steps import StepEnd, StepProcess
from hotloop.apps.top.http.access import Gate
from hotloop.apps.top.http.site import Handler, asset
from hotloop.apps.top.http.site import application as site_of
from hotloop.errors import BadArgument, HotloopError
from hotloop.files.cache import make_private
from hotloop.files.whole import write_whole

PROCESSES = 3  # lessons whose variables are kept at one time; each holds some hundred MiB
LONGEST = 100_000  # characters of code
ASSETS = {
    "/learn.css": ("hotloop.apps.learn", "site", "learn.css", "text/css"),
    "/learn.js": ("hotloop.apps.learn", "site", "learn.js", "text/javascript"),
    "/editor.js": ("hotloop.apps.learn", "site", "editor.js", "text/javascript"),
    "/icon.svg": ("hotloop.apps.top", "page", "icon.svg", "image/svg+xml"),
}
Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Room:
    """A lesson that somebody has opened: its process, and which steps were run in it."""

    def __init__(self, chosen: Lesson) -> None:
        self.lesson = chosen
        self.process = StepProcess(chosen.number)
        self.code = {step.number for step in chosen.steps if step.code}
        self.ran: set[int] = set()  # in this process
        self.seen: set[int] = set()  # ever
        self.busy = False

    async def run(self, step: int, code: str, tell: Callable[[str], None]) -> StepEnd:
        """Run a step; `tell` is called in the event loop."""
        loop = asyncio.get_running_loop()

        def from_thread(words: str) -> None:
            loop.call_soon_threadsafe(tell, words)

        self.busy = True
        try:
            told = await asyncio.to_thread(self.process.run, step, code, from_thread)
        finally:
            self.busy = False
        self.seen.add(step)
        self.ran = set() if told.ended else self.ran | {step}
        if self.seen >= self.code:
            LearnerProgress.load().done(self.lesson.number)
        return told


class School:
    """All that runs for the pages of one server."""

    def __init__(self) -> None:
        self._rooms: dict[int, Room] = {}  # the one used longest ago first
        self._checking = asyncio.Lock()
        self._stop = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()  # they go on where the page is closed

    def close(self) -> None:
        """End every process."""
        self._stop.set()
        for room in self._rooms.values():
            room.process.end()

    async def room(self, chosen: Lesson) -> Room:
        """The room of a lesson. Where too many have a process, one that nobody runs a step in is ended."""
        found = self._rooms.pop(chosen.number, None) or Room(chosen)
        others = [room for room in self._rooms.values() if room.process.alive and not room.busy]
        self._rooms[chosen.number] = found
        for room in others[: max(0, len(others) + 1 - PROCESSES)]:
            room.ran = set()
            await asyncio.to_thread(room.process.end)
        return found

    async def open(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A page shows a lesson: its process begins to import torch."""
        chosen = _lesson(asked)
        LearnerProgress.load().opened(chosen.number)
        room = await self.room(chosen)
        await asyncio.to_thread(room.process.start)
        return {"ran": sorted(room.ran), "busy": room.busy}

    async def run(self, request: web.Request) -> web.StreamResponse:
        """Run a step: lines of JSON, as it prints and as it ends."""
        asked = await _body(request)
        chosen, code = _lesson(asked), _text(asked, "code")
        room = await self.room(chosen)
        step = asked.get("step")
        if not isinstance(step, int) or step not in room.code:
            raise BadArgument(f"lesson {chosen.number} has no step {step!r}", fix="load the page again")
        if room.busy:
            raise HotloopError("a step of this lesson is running", fix="wait for its end, or stop it")
        if sum(each.busy for each in self._rooms.values()) >= PROCESSES:
            raise HotloopError(f"steps of {PROCESSES} other lessons are running", fix="wait for the end of one of them")
        lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        async def work() -> None:
            try:
                told = await room.run(step, code, lambda words: lines.put_nowait({"output": words}))
                done = LearnerProgress.load().lessons.get(str(chosen.number)) == "done"
                lines.put_nowait({"end": asdict(told), "ran": sorted(room.ran), "done": done})
            finally:
                lines.put_nowait(None)

        task = asyncio.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        try:
            while (line := await lines.get()) is not None:
                await response.write(json.dumps(line).encode() + b"\n")
        except ConnectionError:  # the page was closed: the step goes on, as long as it may
            return response
        await task
        return response

    async def stop(self, asked: dict[str, Any]) -> dict[str, Any]:
        """End the process of a lesson; the next step begins with a new one."""
        room = await self.room(_lesson(asked))
        room.ran = set()
        await asyncio.to_thread(room.process.end, "it was stopped.")
        return {"ran": []}

    async def save(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Keep what the editor of an exercise holds."""
        return {"file": str(_keep(exercise(_lesson(asked).number), _text(asked, "text")))}

    async def check(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Keep it, run it, and say what is right."""
        chosen = exercise(_lesson(asked).number)
        file = _keep(chosen, _text(asked, "text"))
        async with self._checking:
            result = await asyncio.to_thread(check, chosen, file, stop=self._stop)
        LearnerProgress.load().checked(chosen.lesson, result.right, len(result.verdicts))
        return {**result.to_json(), "passed": result.passed, "right": result.right}

    async def solution(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"text": exercise(_lesson(asked).number).solution.read_text(encoding="utf-8")}

    async def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Judge an answer of the quiz; a line of code is judged in a process of its own."""
        chosen, given = question(_text(asked, "question")), _text(asked, "given")
        right = await asyncio.to_thread(is_right_apart, chosen, given) if chosen.judge else chosen.is_right(given)
        LearnerProgress.load().answered(chosen.key, right)
        score = views.score(LearnerProgress.load())
        return {"right": right, "why": chosen.why, "answer": views.answer_words(chosen), "score": score}


def application(school: School, gate: Gate) -> web.Application:
    """The routes: GET shows, POST runs."""
    gets: dict[str, Handler] = {
        **{path: asset(*where) for path, where in ASSETS.items()},
        "/": _page(lambda _: views.overview(LearnerProgress.load())),
        "/lesson/{number}": _page(_lesson_page),
        "/quiz": _page(lambda request: views.quiz(LearnerProgress.load(), _number(request.query.get("lesson")))),
    }
    answers = (school.open, school.stop, school.save, school.check, school.solution, school.answer)
    posts: dict[str, Handler] = {f"/api/{answer.__name__}": _answered(answer) for answer in answers}
    posts["/api/run"] = _explained(school.run)
    # Lax: the letter that opens the page is a file, from which a browser would not send a stricter cookie along.
    return site_of("learn", gate, gets, posts, same_site="Lax", longest=6 * LONGEST)


def _lesson_page(request: web.Request) -> str:
    chosen = lesson(_number(request.match_info["number"]) or 0)
    file = draft_file(exercise(chosen.number))
    draft = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
    return views.lesson_page(chosen, LearnerProgress.load(), draft)


def _number(words: str | None) -> int | None:
    return int(words) if words is not None and words.isdecimal() and len(words) < 5 else None


def _page(make: Callable[[web.Request], str]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            return web.Response(text=make(request), content_type="text/html")
        except BadArgument as error:
            raise web.HTTPNotFound(text=f"{error}\n") from None

    return handler


def _answered(answer: Answer) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(await answer(await _body(request)))

    return _explained(handler)


def _explained(handler: Handler) -> Handler:
    """What is wrong with a request is told as data."""

    async def explained(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except HotloopError as error:
            return web.json_response({"error": error.what, "fix": error.fix}, status=400)
        except OSError as error:
            what = f"nothing can be written to {data_folder()}: {error.strerror or error}"
            return web.json_response({"error": what, "fix": "HOTLOOP_DATA names another folder"}, status=400)

    return explained


async def _body(request: web.Request) -> dict[str, Any]:
    """The JSON object of a request; other kinds are what a form on another page could send without asking."""
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="This server reads JSON alone.")
    try:
        asked = await request.json()
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise BadArgument("that is no JSON object", fix="load the page again")
    return asked


def _lesson(asked: dict[str, Any]) -> Lesson:
    number = asked.get("lesson")
    return lesson(number if isinstance(number, int) else 0)


def _text(asked: dict[str, Any], name: str) -> str:
    text = asked.get(name)
    if not isinstance(text, str):
        raise BadArgument(f"there is no {name}", fix="load the page again")
    if len(text) > LONGEST:
        raise BadArgument(f"that is more than {LONGEST:,} characters", fix="take some of it out")
    return text


def _keep(chosen: Exercise, text: str) -> Any:
    file = draft_file(chosen)
    make_private(file.parent)
    write_whole(file, text.encode("utf-8", errors="replace"), mode=0o600)
    return file
