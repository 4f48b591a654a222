"""What a process that runs a script is asked and answers, and how long it is waited for."""

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotloop.records.files import write_json
from hotloop.scripts.as_main import interpreter

FAILED = 1  # exit code: the script raised an error


class Exchange:
    """A folder with a request and its answer, as JSON; a process that writes more puts it there too.

    Files, and not a pipe: a script cannot close them, and what it starts does not inherit them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exchange = Exchange(Path(folder))
    ...     exchange.ask({"script": "train.py"})
    ...     Exchange(Path(folder)).answer({"steps": 3})
    ...     exchange.request, exchange.answered
    ({'script': 'train.py'}, {'steps': 3})
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._answer = folder / "answer.json"

    def ask(self, request: Mapping[str, Any]) -> None:
        write_json(self.folder / "request.json", dict(request))

    @property
    def request(self) -> dict[str, Any]:
        asked: dict[str, Any] = json.loads((self.folder / "request.json").read_text(encoding="utf-8"))
        return asked

    def answer(self, words: Mapping[str, Any]) -> None:
        """Whole or not at all, and before a script is told to end: what it does then is its own affair."""
        write_json(self._answer, dict(words))

    @property
    def answered(self) -> dict[str, Any] | None:
        with suppress(OSError, ValueError):
            words: dict[str, Any] = json.loads(self._answer.read_text(encoding="utf-8"))
            return words
        return None

    def command(self, module: str) -> list[str]:
        """The program of hotloop that carries the request out."""
        return [*interpreter(module), str(self.folder)]

    def end(self, wait: Callable[[], int | None], *, limit: float = math.inf, grace: float = math.inf) -> int | None:
        """How the process ends; None where it must be ended: after `limit` seconds, or `grace` after its answer.

        `wait` gives the exit code, or None after a moment.
        """
        begun, answered = time.monotonic(), math.inf
        while (code := wait()) is None:
            now = time.monotonic()
            if answered == math.inf and self._answer.exists():
                answered = now
            if now - begun > limit or now - answered > grace:
                return None
        return code
