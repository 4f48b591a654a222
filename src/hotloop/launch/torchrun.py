"""The door to torchrun: its options, the line that a request means, and a run of it whose errors name the rank."""

import argparse
import contextlib
import difflib
import functools
import logging
import os
import platform
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from hotloop._torch import options_of
from hotloop.device import probe, why_no_cuda
from hotloop.errors import BadArgument, DeviceUnavailable, HotloopError
from hotloop.launch.reach import (
    Endpoint,
    PortTaken,
    another,
    answers,
    brief,
    is_here,
    must_be_free,
    port_taken,
    wait_for,
)
from hotloop.launch.worker import FIRST, INTERRUPTED, OWN
from hotloop.printing.text import plural, printable
from hotloop.scripts.as_main import interpreter
from hotloop.scripts.children import unwound_by_signals

JOIN = 300.0  # seconds for all nodes to meet
TOGETHER = 2  # seconds between failures of which one caused the other
ANSWER = 5.0  # seconds for a rendezvous on this machine to answer
MEETING = {"standalone", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "master_addr", "master_port"}
NOISY = ("torch.distributed.elastic.multiprocessing.api", "torch.distributed.elastic.agent.server.api")
KILLERS = {  # signals that a rank does not send to itself because another one failed, and what they mean
    "SIGKILL": "somebody or the kernel killed it; `dmesg | grep -i 'killed process'` tells whether the host's memory "
    "ran out: fewer workers in the DataLoader need less",
    "SIGSEGV": "it crashed outside of Python; the stack above says in which call",
    "SIGBUS": "often /dev/shm is full: in a container, give `--shm-size=8g` or `--ipc=host`",
    "SIGILL": "a library was built for another processor",
}


class LaunchFailed(HotloopError, RuntimeError):
    """The script failed in a rank, which has told its traceback, or a signal ended all ranks."""

    def __init__(self, what: str, *, fix: str | None = None, exit_code: int = 1) -> None:
        super().__init__(what, fix=fix)
        self.exit_code = exit_code


class NodesDidNotMeet(HotloopError, RuntimeError):
    """The nodes of a run did not come together."""

    exit_code = 4


@dataclass(frozen=True)
class LaunchRequest:
    """What is to be launched, and where; `passed` are options of torchrun itself."""

    target: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    gpus: int | None = None  # None: all
    processes: int | None = None
    nodes: str | None = None
    node_rank: int | None = None
    master: Endpoint | None = None
    rendezvous: Endpoint | None = None
    join_timeout: float = JOIN
    passed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("gpus", "processes"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise BadArgument(
                    f"--{name} {number}",
                    fix="give 1 or more; `--processes 2` runs two processes on the CPU where there is no GPU",
                )
        if self.gpus is not None and self.processes is not None:
            raise BadArgument("--gpus and --processes", fix="give one of them: each GPU gets one process")
        if self.master is not None and self.rendezvous is not None:
            raise BadArgument(
                "--master and --rendezvous",
                fix="give --master with --node-rank where each node knows its number, else --rendezvous alone",
            )
        if (self.master is None) != (self.node_rank is None):
            missing = "--master" if self.master is None else "--node-rank"
            raise BadArgument(
                f"{missing} is missing",
                fix="on every node: --nodes 2 --node-rank R --master HOST:PORT, where R is 0 on HOST, 1 on the next",
            )
        most = self.node_range[1]
        meets = self.master or self.rendezvous or _dests(self.passed) & {"rdzv_endpoint", "master_addr"}
        if most > 1 and not meets:
            raise BadArgument(
                f"--nodes {self.nodes} without a place where they meet",
                fix=f"give the same host and port on every node: --nodes {self.nodes} --rendezvous node-0:29500",
            )
        if self.node_rank is not None and not 0 <= self.node_rank < most:
            raise BadArgument(
                f"--node-rank {self.node_rank} of {plural(most, 'node')}", fix=f"number the nodes from 0 to {most - 1}"
            )
        if not self.module and "no_python" not in _dests(self.passed) and not Path(self.target).is_file():
            raise BadArgument(
                f"there is no file {printable(self.target)}",
                fix="give the script as you would give it to python; a module is given with -m",
            )

    @property
    def node_range(self) -> tuple[int, int]:
        """The fewest and the most nodes.

        >>> LaunchRequest("hotloop", module=True).node_range
        (1, 1)
        """
        least, _, most = (self.nodes or "1").partition(":")
        if not (least.isdecimal() and (most or least).isdecimal()) or not 0 < int(least) <= int(most or least):
            raise BadArgument(f"--nodes {printable(self.nodes or '')!r}", fix="give a number, or MIN:MAX such as 2:4")
        return int(least), int(most or least)


@dataclass(frozen=True)
class TorchrunLine:
    """A request as torchrun's options, and the environment that goes with them."""

    request: LaunchRequest
    options: tuple[str, ...]
    processes: int  # on this node; 0 where torchrun is to find out
    environment: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The command that a person could type instead."""
        request = self.request
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        target = ["-m", request.target] if request.module else [request.target]
        return " ".join([*settings, shlex.join(["torchrun", *self.options, *target, *request.arguments])])


def option(name: str, *others: str) -> argparse.Action:
    """An option of torchrun by its name, with its dashes; `others` are names that may have been meant too."""
    known = _options()
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, [*others, *known], 1)
    raise BadArgument(
        f"neither hotloop launch nor torchrun has an option {printable(name)}",
        fix=f"did you mean {close[0]}?" if close else "options of your script stand after its name",
    )


def takes_value(name: str, *others: str) -> bool:
    return option(name, *others).nargs != 0


@functools.cache
def _options() -> dict[str, argparse.Action]:
    return options_of(torchrun.get_args_parser())


def _dests(passed: tuple[str, ...]) -> set[str]:
    """What options of torchrun set, by argparse's names."""
    return {option(word.partition("=")[0]).dest for word in _names(passed)} if passed else set()


def _names(passed: tuple[str, ...]) -> Iterator[str]:
    words = iter(passed)
    for word in words:
        yield word
        if "=" not in word and takes_value(word):
            next(words, None)


def line_for(request: LaunchRequest) -> TorchrunLine:
    """The torchrun line of a request, on this machine; more GPUs than there are is an error."""
    given = _dests(request.passed)
    for ours, theirs, asked in (
        ("--gpus or --processes", "nproc_per_node", request.gpus or request.processes),
        ("--nodes", "nnodes", request.nodes),
    ):
        if asked is not None and theirs in given:
            raise BadArgument(f"{ours} and torchrun's --{theirs.replace('_', '-')}", fix="give one of them")
    options, remarks = [], []
    inherited = {each.dest for each in _options().values() if f"PET_{each.dest.upper()}" in os.environ} - given
    if inherited:  # as the operators of Kubernetes set them
        names = ", ".join(sorted(f"PET_{name.upper()}" for name in inherited))
        remarks.append(f"torchrun takes {names} from the environment")
    processes = 0
    if "nproc_per_node" not in given | inherited or request.gpus or request.processes:
        processes, words = _processes(request)
        options.append(f"--nproc-per-node={processes}")
        remarks += words
    if request.node_range[1] > 1:
        options.append(f"--nnodes={request.nodes}")
    if not (given | inherited) & MEETING or request.master or request.rendezvous:
        options = [*_meeting(request, given), *options]
    environment = {}
    if processes and "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, _cores() // processes))
    _parsed([*options, *request.passed, request.target])  # so that a wrong value is told now
    return TorchrunLine(request, (*options, *request.passed), processes, environment, tuple(remarks))


def _parsed(words: list[str]) -> argparse.Namespace:
    """Words as torchrun reads them, with its complaint in words of ours, not in two pages."""
    parser = torchrun.get_args_parser()

    def complain(message: str) -> NoReturn:
        raise BadArgument(f"torchrun: {printable(message)}", fix="`torchrun --help` explains its options")

    parser.error = complain  # type: ignore[method-assign]
    return parser.parse_args(words)


def _processes(request: LaunchRequest) -> tuple[int, list[str]]:
    """How many processes here, and what to say about that."""
    if request.processes is not None:
        return request.processes, []
    there = _gpus()
    if request.gpus is None:
        return (
            (there, [])
            if there
            else (1, ["no GPU that torch can use: 1 process on the CPU (`hotloop device` says why)"])
        )
    if request.gpus <= there:
        return request.gpus, []
    if there:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "" if hidden is None else f" with CUDA_VISIBLE_DEVICES={printable(hidden)}"
        raise DeviceUnavailable(
            f"--gpus {request.gpus}: torch sees {plural(there, 'GPU')} here{seen}",
            fix=f"give --gpus {there}, or --gpus auto for all; more GPUs on other machines are joined with --nodes",
        )
    cause = next(iter(why_no_cuda(probe())), None)
    raise DeviceUnavailable(
        f"--gpus {request.gpus}: torch sees no GPU here{'' if cause is None else f': {cause.what}'}",
        fix="`hotloop device` says what to do; "
        f"`hotloop launch --processes {request.gpus}` runs as many processes on the CPU",
    )


def _gpus() -> int:
    """GPUs that torch sees."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _meeting(request: LaunchRequest, given: set[str]) -> list[str]:
    """Where the agents of all nodes meet, as options of torchrun."""
    endpoint = request.master or request.rendezvous
    if endpoint is None:
        # The host's own name may have no address; nobody outside has to reach this run.
        return ["--standalone", *([] if "local_addr" in given else ["--local-addr=127.0.0.1"])]
    settings = [f"join_timeout={max(1, round(request.join_timeout))}"]
    if request.node_rank is not None:  # else torchrun compares the host's name, which fails for an alias
        settings.insert(0, f"is_host={int(request.node_rank == 0)}")
    name = Path(request.target).stem if not request.module else request.target
    ours = {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": str(endpoint),
        "rdzv_id": f"{name}-{request.nodes or 1}".replace(":", "-"),  # the same on every node
        "rdzv_conf": ",".join(settings),
    }
    return [f"--{name.replace('_', '-')}={value}" for name, value in ours.items() if name not in given]


def run(line: TorchrunLine, tell: Callable[[str], None]) -> None:
    """Be torchrun: returns when all ranks have ended well, and raises what a person can read where not."""
    request = line.request
    _must_meet(request, tell)
    os.environ.update(line.environment)
    own = {"no_python", "run_path"}.isdisjoint(_dests(line.options))
    target = ["-m", request.target] if request.module else [request.target]
    worker = interpreter("hotloop.launch.worker")
    worker[1:1] = ["-u"]  # as torchrun does it
    command = ["--no-python", *worker, *target] if own else target
    # Also while nodes meet, when torchrun does not listen to signals yet, nothing temporary is left behind.
    with unwound_by_signals(), tempfile.TemporaryDirectory(prefix="hotloop-launch-") as folder, _quiet():
        logs = [] if "log_dir" in _dests(line.options) else [f"--log-dir={folder}"]
        try:
            torchrun.run(_parsed([*logs, *line.options, *command, *request.arguments]))
        except ChildFailedError as error:
            _rank_failed(error, request)
        except SignalException as error:
            name = signal.Signals(error.sigval).name
            raise LaunchFailed(
                f"stopped by {'Ctrl-C' if name == 'SIGINT' else name}", exit_code=128 + error.sigval
            ) from None
        except RendezvousError as error:
            _did_not_meet(error, request)


def _must_meet(request: LaunchRequest, tell: Callable[[str], None]) -> None:
    """Tell a wrong address, a taken port or a master that is not there, where torchrun would wait in silence."""
    endpoint = request.master or request.rendezvous
    if endpoint is None:
        return
    most = request.node_range[1]
    option = "--master" if request.master else "--rendezvous"
    if request.node_rank == 0 or (request.rendezvous is not None and is_here(endpoint.host)):
        if request.master is not None:
            must_be_free(endpoint, option)
        elif answers(endpoint) and not _is_store(endpoint):  # a store is that of another agent on this machine
            raise PortTaken(
                f"nodes cannot meet at {endpoint}: {port_taken(endpoint.port)}",
                fix=f"end it, or choose another port on every node: {another(endpoint, option)}",
            )
        if most > 1:
            tell(f"waiting up to {brief(request.join_timeout)} for {plural(most, 'node')} to meet at {endpoint}")
    else:
        wait_for(endpoint, request.join_timeout, tell)


def _is_store(endpoint: Endpoint) -> bool:
    """Whether the program that listens there is a rendezvous."""
    joined: list[TCPStore] = []

    def join() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            joined.append(TCPStore(endpoint.host, endpoint.port, is_master=False, timeout=timedelta(seconds=ANSWER)))

    # In a thread: the timeout does not hold for a program that takes the connection and says nothing.
    asking = threading.Thread(target=join, daemon=True)
    asking.start()
    asking.join(ANSWER)
    return bool(joined)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torchrun's own lines about ranks that it ends; LOGLEVEL and HOTLOOP_DEBUG bring them back."""
    if os.environ.get("LOGLEVEL") or os.environ.get("HOTLOOP_DEBUG"):
        yield
        return
    loggers = [logging.getLogger(name) for name in NOISY]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _rank_failed(error: ChildFailedError, request: LaunchRequest) -> NoReturn:
    rank, failure = _first(error)
    code = failure.exitcode
    if code == INTERRUPTED or (request.module and request.target == OWN and code > 0):
        raise SystemExit(code) from None  # the rank itself has said why
    where = f"rank {rank} on {printable(platform.node())}"
    name = failure.signal_name() if code < 0 else None
    if name is not None:
        fix = KILLERS.get(name)
        raise LaunchFailed(
            f"{where} was ended by {name}; the other ranks of this machine were ended too",
            fix=fix or "what it printed last is above",
            exit_code=128 - code,
        ) from None
    message = failure.message.get("message") if isinstance(failure.message, dict) else None
    what = f"{where} failed first" + (f": {printable(message)}" if message else f", with exit code {code}")
    told = "its traceback is above" if message else "what it printed is above"
    raise LaunchFailed(f"{what}\n  {told}; the other ranks of this machine were ended", exit_code=code) from None


def _first(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The rank that began it: one that was killed, else the first that wrote an error, else the first that was seen.

    torchrun lists failures as it saw them. Those of ranks that it ended itself come last, and where it had to kill one,
    half a minute later.
    """
    failures = error.failures
    first = next(iter(failures))
    for rank, failure in failures.items():
        if failure.signal_name() in KILLERS and failure.timestamp - failures[first].timestamp < TOGETHER:
            return rank, failure
    for failure in failures.values():
        mark = Path(failure.error_file).parent.parent / FIRST
        if mark.is_file() and (text := mark.read_text()).isdecimal() and int(text) in failures:
            return int(text), failures[int(text)]
    return first, failures[first]


def _did_not_meet(error: RendezvousError, request: LaunchRequest) -> NoReturn:
    endpoint = request.master or request.rendezvous or "127.0.0.1"
    wanted = f"{request.nodes or 1} nodes"
    if isinstance(error, RendezvousTimeoutError):
        raise NodesDidNotMeet(
            f"{wanted} did not meet at {endpoint} within {brief(request.join_timeout)}",
            fix="start the same command, with the same script and --nodes, on every node; "
            "`--join-timeout 30min` waits longer",
        ) from None
    if isinstance(error, RendezvousClosedError):
        raise NodesDidNotMeet(
            f"the run at {endpoint} has already ended, or failed on another node",
            fix="what that node printed says why; then start all nodes again",
        ) from None
    if isinstance(error, RendezvousConnectionError):
        cause = str(error.__cause__ or error).splitlines()[0]
        raise NodesDidNotMeet(
            f"the connection to {endpoint} failed: {printable(cause)}",
            fix="look at node 0: has it ended, or is its network gone? Then start all nodes again",
        ) from None
    raise NodesDidNotMeet(f"the nodes did not meet at {endpoint}: {printable(str(error))}") from None


def described(line: TorchrunLine) -> dict[str, object]:
    """A line as plain data."""
    request = line.request
    target = ["-m", request.target] if request.module else [request.target]
    return {
        "command": ["torchrun", *line.options, *target, *request.arguments],
        "environment": line.environment,
        "processes": line.processes or None,
        "nodes": request.nodes or "1",
        "python": sys.executable,
        "remarks": list(line.remarks),
    }
