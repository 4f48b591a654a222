"""An unmodified script, run as `python script.py` would run it, and profiled until there is enough.

Run as a program (`python -m hotloop.profiling.script`), so that the script has a process of its own.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import finalize

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hotloop.errors import BadArgument, HotloopError
from hotloop.files import write_json, write_whole
from hotloop.profiling.looking import around
from hotloop.profiling.profiler import Profiler
from hotloop.rounds import Rounds
from hotloop.scripts import Enough, interpreter, quiet_threads, run_as_main, shown_without
from hotloop.text import plural, printable

PROFILE, TRACE = "profile.json", "trace.json.gz"
FOLLOWED = "followed"  # a file that is there once this program has said how the script ended
FAILED, INTERRUPTED = 1, 130
_HERE = str(Path(__file__).parent)


class ScriptDied(HotloopError, RuntimeError):
    """A script took its process with it."""

    exit_code = FAILED


@dataclass(frozen=True)
class ProfileRequest:
    """What is to be profiled."""

    target: str  # a file, or the name of a module
    arguments: tuple[str, ...]
    folder: str  # where the profile and the trace are put
    steps: int
    warmup: int | None
    module: bool

    def command(self) -> list[str]:
        """The program that does it."""
        return [*interpreter("hotloop.profiling.script"), json.dumps(asdict(self))]


class ProfiledScript:
    """A script that is being profiled."""

    def __init__(self, request: ProfileRequest) -> None:
        self._request = request
        self._rounds = Rounds()
        self._profiler = Profiler(
            steps=request.steps, warmup=request.warmup, name=Path(request.target).name, tell=_tell
        )
        self._ended = 0  # times that the script was told to end

    def run(self) -> int:
        """Run the script; the exit code of the program."""
        with self._profiler, _watching(self._updated), around(Optimizer, "__init__", self._expecting):
            ending = self._script()
        if isinstance(ending, Exception):
            _show(ending)
            return FAILED
        if not self._ended:
            try:
                self._write()
            except BadArgument:
                if isinstance(ending, KeyboardInterrupt):
                    return INTERRUPTED
                raise self._too_short(ending) from None
        return 0

    def _script(self) -> BaseException | None:
        """What ended the script; None where it came to its end."""
        try:
            run_as_main(self._request.target, self._request.arguments, module=self._request.module)
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
        """An optimizer has stepped."""
        if not self._profiler.done and self._rounds.ends(id(optimizer)):
            self._profiler.step()
        if self._profiler.done:
            self._end()

    def _end(self) -> None:
        """What was found is written first: what the script does once it is told to end is its own affair."""
        if not self._ended:
            self._write()
            _tell("that is enough: ending the script")
        self._ended += 1
        if self._ended > 2:
            _tell("the script catches every exception, so it is ended without its own clean-up")
            sys.stdout.flush()
            os._exit(0)
        raise Enough

    def _write(self) -> None:
        folder = Path(self._request.folder)
        profile = self._profiler.profile
        write_whole(folder / TRACE, self._profiler.trace)
        write_json(folder / PROFILE, profile.to_json())

    def _too_short(self, ending: BaseException | None) -> BadArgument:
        how = f"ended itself with {ending.code!r}" if isinstance(ending, SystemExit) else "came to its end"
        made = self._profiler.seen
        target = printable(self._request.target)
        if made:
            what = f"{target} {how} after {plural(made, 'training step')}, and a profile needs at least 3"
            return BadArgument(what, fix="let it train longer")
        if calls := self._rounds.calls:
            what = f"{target} {how} after {plural(calls, 'call')} of step(), before all of its optimizers had stepped"
            return BadArgument(what, fix="let it train longer, or build only the optimizers that it uses")
        return BadArgument(
            f"{target} {how} without a training step: no torch.optim optimizer called step() in this process",
            fix="give the arguments with which it trains; a script that trains in processes of its own cannot be seen",
        )


@contextmanager
def _watching(updated: Any) -> Iterator[None]:
    """Notice the steps of all optimizers."""
    hook = register_optimizer_step_post_hook(updated)
    try:
        with quiet_threads():
            yield
    finally:
        hook.remove()


def _show(error: BaseException) -> None:
    """An error as Python shows it, without the frames of this program."""
    sys.stdout.flush()
    print("".join(shown_without(error, _HERE).format()), end="", file=sys.stderr)


def _tell(what: str) -> None:
    print(f"hotloop: {what}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    data = json.loads(arguments[0])
    try:
        code = ProfiledScript(ProfileRequest(**{**data, "arguments": tuple(data["arguments"])})).run()
    except HotloopError as error:
        _tell(str(error))
        code = error.exit_code
    Path(data["folder"], FOLLOWED).touch()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
