"""Scripts in processes that have torch already: it is imported once, and each script gets a fork of that process.

A script's own process takes four seconds to import torch and what its optimizers need; a fork takes none.
"""

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn, Self

TIMEOUT = 240  # seconds; generous: a busy machine is not a failure


class Warm:
    """Runs scripts one after another, each as `python SCRIPT ARGUMENTS` would."""

    def __enter__(self) -> Self:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # no more requests: it ends

    def run(
        self, script: Path | str, *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """What torch reads while it is imported, such as OMP_NUM_THREADS, cannot be set by `environment`."""
        with TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            request = {
                "argv": [str(script), *arguments],
                "cwd": str(cwd),
                "environment": dict(os.environ if environment is None else environment),
                "out": str(out),
                "err": str(err),
            }
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, "the process that has torch ended; what it printed says why"
            said = [file.read_text(encoding="utf-8", errors="replace") for file in (out, err)]
        return subprocess.CompletedProcess([str(script), *arguments], int(answer), *said)


def serve() -> None:
    """Run what is asked for on stdin, a line each, and answer with how it ended."""
    import torch._dynamo  # noqa: F401  # which optimizers import, slowly

    for line in sys.stdin:
        child = os.fork()
        if not child:
            become(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def become(request: dict[str, Any]) -> NoReturn:
    """Run the script in this process, which ends with it as any other, by its error too."""
    signal.alarm(TIMEOUT)
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], os.O_WRONLY | os.O_CREAT),
        (2, request["err"], os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(name, flags, 0o600), number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    serve()
