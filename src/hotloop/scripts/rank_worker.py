"""What `hotloop launch` runs in each rank: the script as Python runs it, and its error told once, with its rank.

torch is not imported here: a script may set its environment before it does so itself.
"""

import faulthandler
import json
import os
import platform
import sys
import time
from pathlib import Path
from types import TracebackType

from hotloop.errors import INTERRUPTED, HotloopError
from hotloop.scripts.as_main import run_as_main, shown_without

FIRST = "first"  # a file with the rank that failed first; made once, by whoever is first
MARK = "HOTLOOP_LAUNCH_PID"
OWN = "hotloop"  # its own verbs say what is wrong without a traceback


def is_worker() -> bool:
    """Whether this process is a rank that `main` runs; what the script starts inherits the mark, not the number."""
    return os.environ.get(MARK) == str(os.getpid())


def who() -> str:
    """This rank, for people: its number, how many there are, and the host."""
    return f"rank {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE', '?')} on {platform.node()}"


def main(words: list[str]) -> None:
    """Run `FILE ARGUMENTS` or `-m MODULE ARGUMENTS`."""
    os.environ[MARK] = str(os.getpid())
    module = words[0] == "-m"
    target, *arguments = words[1:] if module else words
    if sys.stderr is not None:
        faulthandler.enable()  # a Python stack for a crash in C++
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    if again and os.environ.get("LOCAL_RANK") == "0":
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "?")
        sys.stderr.write(f"hotloop launch: restart {again} of {most} on {platform.node()}\n")  # whole, between others
    try:
        run_as_main(target, arguments, module=module)
    except KeyboardInterrupt:  # from the agent, which says so once for all ranks
        sys.exit(INTERRUPTED)
    except Exception as error:  # noqa: BLE001  # whatever the script raises
        _tell(error, own=target == OWN)
        sys.exit(error.exit_code if isinstance(error, HotloopError) and target == OWN else 1)


def _tell(error: Exception, *, own: bool) -> None:
    """Keep the error for the agent; print it in full where this rank is the first of its machine, else in one line."""
    words = own and isinstance(error, HotloopError)
    whole = f"hotloop: {error}\n" if words else "".join(shown_without(error, str(Path(__file__).parent)).format())
    line = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if not _keep(line, whole) and not os.environ.get("HOTLOOP_DEBUG"):
        sys.stderr.write(f"[{who()}] failed after it: {line} (HOTLOOP_DEBUG=1 shows every traceback)\n")
    elif words or sys.excepthook is sys.__excepthook__:
        sys.stderr.write(f"\n[{who()}] failed:\n{whole}")
    else:  # the script's own way to show it
        sys.stderr.write(f"\n[{who()}] failed:\n")
        sys.excepthook(type(error), error, _below(error.__traceback__))
    sys.stderr.flush()


def _keep(line: str, whole: str) -> bool:
    """Write the file in which torchrun looks for a rank's error; whether no other rank of the machine had one."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return True
    extra = {"py_callstack": whole, "timestamp": str(int(time.time()))}
    try:
        Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8")
        with (Path(file).parents[1] / FIRST).open("x") as mark:
            mark.write(os.environ.get("RANK", ""))
    except FileExistsError:
        return False
    except OSError:  # a full disk must not hide the error itself
        return True
    return True


def _below(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame on that is the script's."""
    ours = (str(Path(__file__).parent), "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(sys.argv[1:])
