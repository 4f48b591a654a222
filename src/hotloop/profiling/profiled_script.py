"""An unmodified script, run as `python script.py` would run it, and profiled until there is enough.

Run as a program (`python -m hotloop.profiling.profiled_script`), so that the script has a process of its own.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from hotloop.errors import INTERRUPTED, BadArgument, HotloopError
from hotloop.printing.text import plural, printable
from hotloop.profiling.profiler import Profiler
from hotloop.records import Record
from hotloop.records.files import write_whole
from hotloop.scripts.as_main import shown_without
from hotloop.scripts.exchange import FAILED, Exchange
from hotloop.scripts.kept_files import FilesAside
from hotloop.scripts.training_steps import TRAIN, WITHOUT_STEPS, ScriptSteps

TRACE = "trace.json.gz"  # beside the answer
PROFILE = "profile"  # of an answer; None where this program has said why there is none
_OURS = tuple(str(Path(__file__).parents[1] / name) for name in ("profiling", "scripts"))  # not the script's frames


class ScriptDied(HotloopError, RuntimeError):
    """A script took its process with it."""

    exit_code = FAILED


@dataclass(frozen=True)
class ProfileRequest(Record):
    """What is to be profiled."""

    target: str  # a file, or the name of a module
    arguments: tuple[str, ...]
    steps: int
    warmup: int | None
    module: bool


class ProfiledScript:
    """A script that is being profiled."""

    def __init__(self, request: ProfileRequest, exchange: Exchange) -> None:
        self._request, self._exchange = request, exchange
        self._script = ScriptSteps(self._stepped, _tell)
        self._profiler = Profiler(
            steps=request.steps, warmup=request.warmup, name=Path(request.target).name, tell=_tell
        )

    def run(self) -> int:
        """Run the script; the exit code of the program."""
        request = self._request
        with self._profiler:
            ending = self._script.run(request.target, request.arguments, module=request.module)
        if isinstance(ending, Exception):
            _show(ending)
            return FAILED
        if not self._script.is_ended:
            try:
                self._write()
            except BadArgument:
                if isinstance(ending, KeyboardInterrupt):
                    return INTERRUPTED
                raise self._too_short(ending) from None
        return 0

    def _stepped(self) -> bool:
        """What was found is written first: what the script does once it is told to end is its own affair."""
        self._profiler.step(self._script.device)
        if self._profiler.done:
            self._write()
        return self._profiler.done

    def _write(self) -> None:
        profile = self._profiler.profile
        write_whole(self._exchange.folder / TRACE, self._profiler.trace)
        self._exchange.answer({PROFILE: profile.to_json()})

    def _too_short(self, ending: BaseException | None) -> BadArgument:
        how = f"ended itself with {ending.code!r}" if isinstance(ending, SystemExit) else "came to its end"
        made = self._profiler.seen
        target = printable(self._request.target)
        if made:
            what = f"{target} {how} after {plural(made, 'training step')}, and a profile needs at least 3"
            return BadArgument(what, fix="let it train longer")
        if calls := self._script.calls:
            what = f"{target} {how} after {plural(calls, 'call')} of step(), before all of its optimizers had stepped"
            return BadArgument(what, fix="let it train longer, or build only the optimizers that it uses")
        return BadArgument(
            f"{target} {how} {WITHOUT_STEPS}",
            fix=TRAIN,
        )


def _show(error: BaseException) -> None:
    """An error as Python shows it, without the frames of this program."""
    sys.stdout.flush()
    print("".join(shown_without(error, *_OURS).format()), end="", file=sys.stderr)


def _tell(what: str) -> None:
    print(f"hotloop: {what}", file=sys.stderr, flush=True)


def run(exchange: Exchange) -> int:
    """Run the script; the exit code of the program."""
    try:
        code = ProfiledScript(ProfileRequest.from_json(exchange.request), exchange).run()
    except HotloopError as error:
        _tell(str(error))
        code = error.exit_code
    if exchange.answered is None:
        exchange.answer({PROFILE: None})
    return code


if __name__ == "__main__":
    FilesAside().install(setattr)  # until the process ends: what is run at exit saves too
    sys.exit(run(Exchange(Path(sys.argv[1]))))
