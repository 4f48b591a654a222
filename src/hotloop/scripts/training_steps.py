"""A person's script, run with its training steps noticed, and ended when there were enough of them."""

import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hotloop.scripts.as_main import Enough, quiet_threads, run_as_main
from hotloop.step.rounds import Rounds


class ScriptSteps:
    """Runs a script and calls `on_step` after each of its training steps, until that says that it is enough.

    Steps are found by the optimizers, and by the replays of a CUDA graph in which some have stepped: a replay is one
    step, however often. The script is then ended as Ctrl-C would end it, so that its clean-up runs.
    """

    def __init__(self, on_step: Callable[[], bool], tell: Callable[[str], None]) -> None:
        self._on_step, self._tell = on_step, tell
        self._rounds = Rounds()
        self._told = 0  # times that the script was told to end
        self._captured: dict[int, None] = {}  # optimizers that step in the graph that is captured now
        self._graphs: WeakKeyDictionary[torch.cuda.CUDAGraph, tuple[int, ...]] = WeakKeyDictionary()

    @property
    def is_ended(self) -> bool:
        """Whether it was told to end."""
        return self._told > 0

    @property
    def calls(self) -> int:
        """How often optimizers have stepped lately, whole steps or not."""
        return self._rounds.calls

    def run(
        self, target: str, arguments: Sequence[str], *, module: bool = False, sources: Mapping[str, str] | None = None
    ) -> BaseException | None:
        """Run it; what ended it, or None where it came to its end or was told to end.

        `sources` are run in place of what files hold, by their absolute paths.
        """
        with ExitStack() as undo:
            undo.callback(register_optimizer_step_post_hook(self._updated).remove)
            undo.enter_context(quiet_threads())
            undo.enter_context(around(Optimizer, "__init__", self._expecting))
            undo.enter_context(around(torch.cuda.CUDAGraph, "capture_end", self._capturing))
            undo.enter_context(around(torch.cuda.CUDAGraph, "replay", self._replaying))
            if sources:
                undo.enter_context(_in_place_of_files(sources))
            try:
                run_as_main(
                    target, arguments, module=module, source=None if module else (sources or {}).get(_path_of(target))
                )
            except Enough:
                return None
            except SystemExit as ending:
                if isinstance(ending.code, str):
                    print(ending.code, file=sys.stderr)
                return ending
            except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # whatever the script lets through
                return error
        return None

    def _expecting(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def build(optimizer: Optimizer, *args: Any, **options: Any) -> None:
            original(optimizer, *args, **options)
            self._rounds.expect(id(optimizer))
            finalize(optimizer, self._rounds.forget, id(optimizer)).atexit = False

        return build

    def _updated(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped, or will in the replays of what is captured now."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._captured[id(optimizer)] = None
        else:
            self._count(id(optimizer))

    def _count(self, optimizer: int) -> None:
        if (not self._told and self._rounds.ends(optimizer) and self._on_step()) or self._told:
            self.end()

    def _capturing(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def capture_end(graph: torch.cuda.CUDAGraph) -> None:
            original(graph)
            self._graphs[graph], self._captured = tuple(self._captured), {}

        return capture_end

    def _replaying(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def replay(graph: torch.cuda.CUDAGraph) -> None:
            original(graph)
            for optimizer in self._graphs.get(graph, ()):
                self._count(optimizer)

        return replay

    def end(self) -> None:
        """End the script from inside: from a call that it makes."""
        if not self._told:
            self._tell("that is enough: ending the script")
        self._told += 1
        if self._told > 2:
            self._tell("the script catches every exception, so it is ended without its own clean-up")
            sys.stdout.flush()
            os._exit(0)
        raise Enough


@contextmanager
def around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Put another function in place of an attribute for a while."""
    before = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def _in_place_of_files(sources: Mapping[str, str]) -> Iterator[None]:
    """Modules that are imported from these files run these sources."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
            path = _path_of(loader.get_filename(name))
            if path in sources:
                return compile(sources[path], path, "exec", dont_inherit=True)
            found: CodeType | None = original(loader, name)
            return found

        return get_code

    with around(importlib.machinery.SourceFileLoader, "get_code", make):
        yield


def _path_of(file: str) -> str:
    return os.path.realpath(file)
