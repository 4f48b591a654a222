"""torchrun, with checks before it and errors that name the rank."""

import argparse
import logging
import os
import platform
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

from hotloop._torch import options_of
from hotloop.device.causes import why_no_cuda
from hotloop.device.probe import probe
from hotloop.errors import INTERRUPTED, BadArgument, DeviceUnavailable, HotloopError
from hotloop.plan import did_you_mean
from hotloop.printing.text import duration, plural, printable
from hotloop.scripts.as_main import interpreter
from hotloop.scripts.children import unwound_by_signals
from hotloop.scripts.rank_worker import FIRST, OWN

PORT = 29500  # torchrun's own default
JOIN = 300.0  # seconds for all nodes to meet
ATTEMPT = 2.0  # seconds for one connection to node 0
NOT_MET = 4  # exit code
TOGETHER = 2  # seconds between failures of which one caused the other
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
    """A rank failed and has told its traceback, a signal ended all ranks, or the nodes did not meet."""

    def __init__(self, what: str, *, fix: str | None = None, exit_code: int = 1) -> None:
        super().__init__(what, fix=fix)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Endpoint:
    """The host and port at which nodes meet.

    >>> Endpoint.parse("node-0:29511"), str(Endpoint.parse("node-0")), Endpoint.parse("[::1]:80").host
    (Endpoint(host='node-0', port=29511), 'node-0:29500', '::1')
    """

    host: str
    port: int = PORT

    @classmethod
    def parse(cls, words: str) -> "Endpoint":
        try:
            parts = urlsplit(f"//{words}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or port == 0:
            raise BadArgument(
                f"--master {printable(words)!r} is not a host and a port",
                fix=f"give both, such as --master node-0:{PORT}",
            )
        return cls(host, port or PORT)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


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
        most = self.most_nodes
        if most > 1 and self.master is None and not _given(self.passed) & MEETING:
            raise BadArgument(
                f"--nodes {self.nodes} without a place where they meet",
                fix=f"give the same host and port on every node: --nodes {self.nodes} --master node-0:29500",
            )
        if self.node_rank is not None and (self.master is None or self.node_rank not in range(most)):
            raise BadArgument(
                f"--node-rank {self.node_rank} of {plural(most, 'node')}",
                fix="on every node: --nodes 2 --node-rank R --master HOST:PORT, where R is 0 on HOST, 1 on the next",
            )
        if not self.module and "no_python" not in _given(self.passed) and not Path(self.target).is_file():
            raise BadArgument(
                f"there is no file {printable(self.target)}",
                fix="give the script as you would give it to python; a module is given with -m",
            )

    @property
    def script(self) -> list[str]:
        """The script or module, as Python takes it."""
        return ["-m", self.target] if self.module else [self.target]

    @property
    def most_nodes(self) -> int:
        """The number of nodes, the largest where it is MIN:MAX."""
        least, _, most = (self.nodes or "1").partition(":")
        if not (least.isdecimal() and (most or least).isdecimal()) or not 0 < int(least) <= int(most or least):
            raise BadArgument(f"--nodes {printable(self.nodes or '')!r}", fix="give a number, or MIN:MAX such as 2:4")
        return int(most or least)


@dataclass(frozen=True)
class TorchrunLine:
    """A request as torchrun's options, and the environment that goes with them."""

    request: LaunchRequest
    options: tuple[str, ...]
    processes: int  # on this node; 0 where torchrun is to find out
    environment: dict[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """What a person could type instead."""
        return ["torchrun", *self.options, *self.request.script, *self.request.arguments]

    def __str__(self) -> str:
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.command)])

    def to_json(self) -> dict[str, object]:
        return {
            "command": self.command,
            "environment": self.environment,
            "processes": self.processes or None,
            "nodes": self.request.nodes or "1",
            "python": sys.executable,
            "remarks": list(self.remarks),
        }


def takes_value(name: str, *others: str) -> bool:
    """Whether an option of torchrun has a value; `others` are names that may have been meant too."""
    known = options_of(torchrun.get_args_parser())
    if name not in known:
        raise BadArgument(
            f"neither hotloop launch nor torchrun has an option {printable(name)}",
            fix=did_you_mean(name, [*others, *known]).strip() or "options of your script stand after its name",
        )
    return known[name].nargs != 0


def _parsed(words: Sequence[str], *, defaults: bool = True) -> argparse.Namespace:
    """Words as torchrun reads them, with its complaint in words of ours, not in two pages."""
    parser = torchrun.get_args_parser()
    if not defaults:
        for each in options_of(parser).values():
            each.default = argparse.SUPPRESS

    def complain(message: str) -> NoReturn:
        raise BadArgument(f"torchrun: {printable(message)}", fix="`torchrun --help` explains its options")

    parser.error = complain  # type: ignore[method-assign]
    return parser.parse_args(words)


def _given(passed: Sequence[str]) -> set[str]:
    """What options of torchrun set, by argparse's names."""
    return set(vars(_parsed([*passed, "script.py"], defaults=False)))


def line_for(request: LaunchRequest) -> TorchrunLine:
    """The torchrun line of a request, on this machine; more GPUs than there are is an error."""
    given = _given(request.passed)
    options, remarks = [], []
    known = {each.dest for each in options_of(torchrun.get_args_parser()).values()}
    inherited = {name for name in known if f"PET_{name.upper()}" in os.environ} - given
    if inherited:  # as the operators of Kubernetes set them
        names = ", ".join(sorted(f"PET_{name.upper()}" for name in inherited))
        remarks.append(f"torchrun takes {names} from the environment")
    processes = 0
    if "nproc_per_node" not in given | inherited or request.gpus or request.processes:
        processes, words = _processes(request)
        options.append(f"--nproc-per-node={processes}")
        remarks += words
    if request.most_nodes > 1:
        options.append(f"--nnodes={request.nodes}")
    if request.master or not (given | inherited) & MEETING:
        options = [*_meeting(request), *options]
    environment = {}
    if processes and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environment["OMP_NUM_THREADS"] = str(max(1, cores // processes))
    return TorchrunLine(request, (*options, *request.passed), processes, environment, tuple(remarks))


def _processes(request: LaunchRequest) -> tuple[int, list[str]]:
    """How many processes here, and what to say about that."""
    if request.processes is not None:
        return request.processes, []
    there = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if request.gpus is None:
        why = "no GPU that torch can use: 1 process on the CPU (`hotloop device` says why)"
        return (there, []) if there else (1, [why])
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


def _meeting(request: LaunchRequest) -> list[str]:
    """Where the agents of all nodes meet, as options of torchrun."""
    if request.master is None:
        # The host's own name may have no address; nobody outside has to reach this run.
        return ["--standalone", "--local-addr=127.0.0.1"]
    # Without a number of the node torchrun compares the host's name, which fails for an alias.
    is_host = "" if request.node_rank is None else f"is_host={int(request.node_rank == 0)},"
    name = request.target if request.module else Path(request.target).stem
    seconds = max(1, round(request.join_timeout))
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={request.master}",
        f"--rdzv-id={name}-{request.nodes or 1}".replace(":", "-"),  # the same on every node
        f"--rdzv-conf={is_host}join_timeout={seconds},read_timeout={seconds}",
    ]


def run(line: TorchrunLine, tell: Callable[[str], None]) -> None:
    """Be torchrun: returns when all ranks have ended well, and raises what a person can read where not."""
    request = line.request
    if request.master is not None:
        nodes, longest = plural(request.most_nodes, "node"), duration(request.join_timeout)
        tell(f"waiting up to {longest} for {nodes} to meet at {request.master}")
        if request.node_rank == 0:
            _must_be_free(request.master)
        elif request.node_rank is not None:
            wait_for(request.master, request.join_timeout)
    os.environ.update(line.environment)
    if not os.environ.get("LOGLEVEL") and not os.environ.get("HOTLOOP_DEBUG"):
        for name in NOISY:  # lines about ranks that torchrun ends
            logging.getLogger(name).setLevel(logging.CRITICAL)
    given = _given(line.options)
    own = {"no_python", "run_path"}.isdisjoint(given)
    worker = interpreter("hotloop.scripts.rank_worker")
    worker[1:1] = ["-u"]  # as torchrun does it
    command = ["--no-python", *worker, *request.script] if own else request.script
    # Also while nodes meet, when torchrun does not listen to signals yet, nothing temporary is left behind.
    with unwound_by_signals(), tempfile.TemporaryDirectory(prefix="hotloop-launch-") as folder:
        logs = [] if "log_dir" in given else [f"--log-dir={folder}"]
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


def _must_be_free(endpoint: Endpoint) -> None:
    """Refuse a port of this machine that cannot be listened on; torchrun would print a stack of C++."""
    try:
        socket.create_server(("", endpoint.port)).close()
    except OSError as error:
        raise LaunchFailed(
            f"nodes cannot meet at {endpoint}: port {endpoint.port} of this host cannot be listened on:"
            f" {(error.strerror or str(error)).lower()}",
            fix=f"end what has it, or choose another everywhere: --master {replace(endpoint, port=endpoint.port + 1)}",
            exit_code=NOT_MET,
        ) from None


def wait_for(endpoint: Endpoint, patience: float) -> None:
    """Return once something listens there; torchrun would print a warning every second, and stacks of C++."""
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((endpoint.host, endpoint.port), ATTEMPT).close()
        except OSError as error:
            why = (error.strerror or str(error)).lower()
        else:
            return
        if time.monotonic() >= end:
            raise LaunchFailed(
                f"{endpoint} did not answer within {duration(patience)}: {why}",
                fix="start node 0 there, let its port through the firewall, and check that "
                f"`getent hosts {printable(endpoint.host)}` gives an address that this machine can reach; "
                "`--join-timeout 30min` waits longer",
                exit_code=NOT_MET,
            )
        time.sleep(min(1.0, max(0.0, end - time.monotonic())))


def _rank_failed(error: ChildFailedError, request: LaunchRequest) -> NoReturn:
    rank, failure = _first(error)
    code = failure.exitcode
    if code == INTERRUPTED or (request.module and request.target == OWN and code > 0):
        raise SystemExit(code) from None  # the rank itself has said why
    where = f"rank {rank} on {printable(platform.node())}"
    if code < 0:
        raise LaunchFailed(
            f"{where} was ended by {failure.signal_name()}; the other ranks of this machine were ended too",
            fix=KILLERS.get(failure.signal_name(), "what it printed last is above"),
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
    endpoint = request.master or "127.0.0.1"
    if isinstance(error, RendezvousTimeoutError):
        what = f"{request.nodes or 1} nodes did not meet at {endpoint} within {duration(request.join_timeout)}"
        fix = "start the same command on every node, with the same --nodes; `--join-timeout 30min` waits longer"
    elif isinstance(error, RendezvousClosedError):
        what = f"the run at {endpoint} has already ended, or failed on another node"
        fix = "what that node printed says why; then start all nodes again"
    else:
        cause = str(error.__cause__ or error).splitlines()[0]
        what = f"the nodes did not meet at {endpoint}: {printable(cause)}"
        fix = "look at node 0: has it ended, is its network gone, has another program the port? Then start all again"
    raise LaunchFailed(what, fix=fix, exit_code=NOT_MET) from None
