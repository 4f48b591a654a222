"""`Ranks`: the processes of one run, as torchrun starts them, and the few things that they tell one another.

A process that torchrun has started joins the others when its first `Loop` is made; one that is alone joins nothing,
unless the script has made a process group itself. Gradients go through DDP or FSDP;
what is here is the rest: which device is whose, whether all run the same thing, small numbers that are added up.
"""

import atexit
import json
import os
import re
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # it is there
from torch.distributed.rendezvous import rendezvous

from hotloop.device import Choice, pick
from hotloop.device.backend import backend_of
from hotloop.errors import BadArgument, DeviceUnavailable, HotloopError, PlanWarning
from hotloop.printing.text import plural, printable

TIMEOUT_GRACE = 2.0  # seconds that PyTorch may take longer than it was told to
TIMEOUT = 600.0  # seconds that a rank waits for the others; HOTLOOP_RANK_TIMEOUT says otherwise
JOINED = "HOTLOOP_JOINED"  # the process that has joined; those that it starts inherit its variables, and do not join
# Errors of gloo have no type of their own; those inside a backward pass are known by their words alone.
GLOO = re.compile(r"\bgloo(/|::)|\bpair closure\b|ddp_comm_hooks|connection (closed|reset) by peer", re.IGNORECASE)
COLLECTIVES = (
    "torch.distributed.distributed_c10d",
    "hotloop.ranks.group",
    "hotloop.step.across",
)  # their errors are so too
# What stands before the words of an error: where in PyTorch's sources it was raised.
WHERE = re.compile(r"^(Got the following error when running the callback: \w+: )?(\[?\S+\.(cc|cpp|h|hpp):\d+\]\s*)?")
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RanksDiffer(HotloopError):
    """Ranks of one run do not do the same thing."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run."""

    rank: int
    size: int
    local_rank: int  # on this host
    host: str
    device: torch.device
    group: Any = None  # of collectives on the device; None: the default one
    hosts: Any = None  # of collectives on the host; None: the default one

    @property
    def is_first(self) -> bool:
        """Whether this one prints, logs and saves."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} on {printable(self.host)}"

    def gather(self, value: Any) -> list[Any]:
        """What each rank has, by rank; plain data as JSON knows it."""
        mine = torch.frombuffer(bytearray(json.dumps(value).encode() or b" "), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([mine.numel()]), group=self.hosts)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        every = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(every, padded, group=self.hosts)
        return [json.loads(bytes(each[: int(n)].tolist())) for each, n in zip(every, lengths, strict=True)]

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums over all ranks, in float64."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.hosts)
        return tensor.tolist()

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest over all ranks, of each."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.hosts)
        return tensor.tolist()

    def from_rank(self, tensor: Tensor, rank: int) -> Tensor:
        """The tensor of a rank, which has the same shape everywhere; on the host."""
        given = tensor.clone()
        dist.broadcast(given, rank, group=self.hosts)
        return given

    def share_rng_state(self, generators: Sequence[torch.Generator]) -> None:
        """Give generators of the host the states that they have on rank 0, so that all ranks draw one order."""
        for generator in generators:
            generator.set_state(self.from_rank(generator.get_state(), 0))

    def must_agree(self, what: dict[str, Any]) -> None:
        """Refuse to go on where another rank has something else than rank 0; `what` is in words a person knows."""
        every = self.gather({"host": self.host, **what})
        for name in dict.fromkeys(name for each in every for name in each if name != "host"):
            for rank, other in enumerate(every):
                if other.get(name) != every[0].get(name):
                    here, there = (printable(str(each.get(name)))[:200] for each in (every[0], other))
                    raise RanksDiffer(
                        f"rank {rank} on {printable(other['host'])} has another {name} than rank 0 on"
                        f" {printable(every[0]['host'])}: {there} instead of {here}",
                        fix="start the same script with the same arguments, files and versions everywhere",
                    )


class Agreement:
    """What ranks agree on while they train, without a wait: a rank that wants to stop or to save says so, and all do it
    after the same step.

    From time to time the wishes of all ranks are reduced in the background; the result is looked at one period later,
    in all of them after the same step.
    """

    PERIOD = 0.25  # seconds that a period should take
    MOST = 1000  # steps of a period

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._stop = self._save = False  # what all do where they can
        self._period = 1  # steps
        self._steps = self._next = 0  # so far, and when wishes are reduced again
        self._since = time.perf_counter()  # the last step
        self._work: Any = None
        self._wishes = torch.zeros(0)

    def after_step(self, stop: bool, save: bool) -> tuple[bool, bool]:
        """Say what this rank wishes for; returns what all have agreed on, to stop and to save."""
        self._steps += 1
        now = time.perf_counter()
        pace, self._since = now - self._since, now
        if self._steps >= self._next:
            if self._work is not None:
                self._work.wait()
                stops, saves, period = self._wishes.tolist()
                self._stop, self._save, self._period = self._stop or stops > 0, self._save or saves > 0, int(period)
            wished = int(min(max(self.PERIOD / max(pace, 1e-6), 1), self.MOST))
            self._wishes = torch.tensor([float(stop), float(save), wished if self._ranks.is_first else 0.0])
            self._work = dist.all_reduce(self._wishes, dist.ReduceOp.MAX, group=self._ranks.hosts, async_op=True)
            self._next = self._steps + self._period
        return self._stop, self._save

    def saved(self) -> None:
        """Note that the agreed save is done."""
        self._save = False

    def end(self) -> None:
        """After the last step of a fit, in all ranks: nothing is under way any more."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._stop = self._save = False


_ranks: Ranks | None = None


def ranks_of(want: str | torch.device | Choice | None) -> tuple[Ranks | None, Choice]:
    """The ranks of this run and the device of this one; None for a process that is alone."""
    global _ranks  # noqa: PLW0603  # a process belongs to one run
    if _ranks is not None and dist.is_initialized():
        if want is not None and not isinstance(want, Choice):
            want = _own_device(want, _ranks.local_rank)
        choice = pick(_ranks.device if want is None else want)
        return (_ranks if choice.device == _ranks.device else None), choice
    if world_size() < 2 and not _has_own_group():
        return None, pick(want)
    local = _local_rank(want)
    choice = pick(_own_device(want, local))
    _ranks = _joined(choice.device, local)
    return _ranks, choice


def _local_rank(want: str | torch.device | Choice | None) -> int:
    """The number of this process on its host; where nothing says it, as under `mp.spawn`, that of the GPU it takes."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if name in os.environ:
            return _number(name)
    gpus = backend_of("cuda").device_count()
    rank = dist.get_rank() if _is_initialized() else _number("RANK", "0")
    if gpus > 1 and rank == 0 and str(want) in ("None", "cuda", "auto"):
        warnings.warn(
            f"LOCAL_RANK is not set, so that each rank takes the GPU of its rank modulo {gpus}; `hotloop launch` and"
            " torchrun set it, and Loop(…, device=…) says otherwise",
            PlanWarning,
            stacklevel=4,
        )
    return rank % gpus if gpus else 0


def world_size() -> int:
    """How many processes train together, as torchrun has started them; 1 for a process that is alone.

    A loader that is handed to a `Loop` has the batches of all of them; a rank has one in so many.
    """
    return dist.get_world_size() if _is_initialized() else _size()


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _has_own_group() -> bool:
    """Whether the script has made a process group of what torchrun has set: then it trains in it, if alone."""
    return _is_initialized() and all(os.environ.get(name) for name in NEEDED)


def _size() -> int:
    """How many processes torchrun has started for this run."""
    if not dist.is_available() or os.environ.get(JOINED, str(os.getpid())) != str(os.getpid()):
        return 1
    if not all(os.environ.get(name) for name in NEEDED):
        return 1
    size, rank = _number("WORLD_SIZE"), _number("RANK")
    if rank >= size:
        raise BadArgument(
            f"RANK={rank} with WORLD_SIZE={size}: ranks are counted from 0 to {size - 1}",
            fix="start the script with `hotloop launch`, which sets both",
        )
    return size if _number("MASTER_PORT") else 1


def _number(name: str, default: str = "") -> int:
    """A variable that torchrun sets."""
    words = os.environ.get(name, default)
    try:
        if (number := int(words)) >= 0:
            return number
    except ValueError:
        pass
    raise BadArgument(
        f"{name}={printable(words)!r} in the environment is no number that a rank could have",
        fix="start the script with `hotloop launch`, which sets it, or as one process: `env -u RANK python …`",
    )


def _own_device(want: str | torch.device | Choice | None, local: int) -> str | torch.device | Choice | None:
    """The device of a rank: with several GPUs, each has its own."""
    there = backend_of("cuda").device_count()
    if isinstance(want, Choice) or not there:
        return want
    text = "cuda" if want is None else str(want)
    if text not in ("cuda", "auto"):
        return want
    if local >= there:
        raise DeviceUnavailable(
            f"rank {os.environ.get('RANK', '?')} is process {local} (counted from 0) on {socket.gethostname()}, which"
            f" has {plural(there, 'GPU')}",
            fix=f"start {there} on this host: `hotloop launch --gpus {there}`; or let them share one, slowly:"
            ' Loop(…, device="cuda:0")',
        )
    return f"cuda:{local}"


def _joined(device: torch.device, local: int) -> Ranks:
    """Join the other processes: gloo between hosts, NCCL between GPUs of which each belongs to one rank."""
    if not dist.is_initialized():
        longest = timeout()
        try:
            _in_time(partial(_join, longest), longest)
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise _cannot_join(error) from error
        os.environ[JOINED] = str(os.getpid())
        atexit.register(_leave)
    hosts = None if "gloo" in str(dist.get_backend_config()) else dist.new_group(backend="gloo", timeout=timeout())
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), local, socket.gethostname(), device, None, hosts)
    if not ranks.is_first:  # what is true of all ranks is said once
        warnings.simplefilter("ignore", PlanWarning)
    if backend_of(device).collectives == "nccl":
        backend_of(device).set_current()
        ranks = replace(ranks, group=_group_of_gpus(ranks))
    return ranks


def _group_of_gpus(ranks: Ranks) -> Any:
    """NCCL, unless two ranks share a GPU, which it refuses, or the person has made a group of it."""
    every = ranks.gather([ranks.host, backend_of(ranks.device).uuid()])
    is_shared = len({tuple(each) for each in every}) < ranks.size
    if is_shared or not dist.is_nccl_available() or "nccl" in str(dist.get_backend_config()):
        return None
    return dist.new_group(backend="nccl", timeout=timeout())


def _join(longest: timedelta) -> None:
    """Make the process group. One store of torchrun serves all restarts of a run, with what earlier ranks left in it.

    So that nobody reads the address of a rank that is no more, each restart has a prefix of its own.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group("gloo", timeout=longest)
        return
    store, rank, size = next(iter(rendezvous("env://", timeout=longest)))
    store = PrefixStore(_prefix(store, rank, size, longest), store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=longest)


def _prefix(store: Any, rank: int, size: int, longest: timedelta) -> str:
    """A word that all ranks of this restart have, and none of an earlier one: rank 0 answers each by its own name."""
    mine = uuid4().hex
    if rank:
        store.set(f"hotloop/hello {rank}", mine)
        store.wait([f"hotloop/answer {mine}"], longest)
        prefix = str(store.get(f"hotloop/answer {mine}").decode())
        store.set(f"hotloop/{prefix} {rank}", "heard")
        return prefix
    end = time.monotonic() + longest.total_seconds()
    answered: set[str] = set()
    missing = set(range(1, size))
    while missing := {other for other in missing if not store.check([f"hotloop/{mine} {other}"])}:
        for hello in (f"hotloop/hello {other}" for other in missing):
            if store.check([hello]) and (name := store.get(hello).decode()) not in answered:
                answered.add(name)
                store.set(f"hotloop/answer {name}", mine)
        if time.monotonic() > end:
            raise TimeoutError(f"no word from {plural(len(missing), 'rank')}, such as rank {min(missing)}")
        time.sleep(0.01)
    return mine


def _in_time(join: Callable[[], object], longest: timedelta) -> None:
    """Call it in a thread: PyTorch waits without end for the answer of a program that is none of the ranks."""
    failed: list[Exception] = []

    def call() -> None:
        try:
            join()
        except Exception as error:  # noqa: BLE001  # raised again where it is waited for
            failed.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(longest.total_seconds() + TIMEOUT_GRACE)
    if thread.is_alive():
        raise TimeoutError(f"nothing there has answered as a rank does for {longest.total_seconds():g} s")
    if failed:
        raise failed[0]


def _cannot_join(error: Exception) -> HotloopError:
    port = printable(os.environ["MASTER_PORT"])
    where = f"{printable(os.environ['MASTER_ADDR'])}:{port}"
    fix = (
        "look whether all processes were started, and whether a firewall keeps them apart; `hotloop launch` starts"
        " those of one host and says how to start those of others"
    )
    if "EADDRINUSE" in str(error):
        fix = f"port {port} belongs to another program: give all ranks another MASTER_PORT; `hotloop launch` finds one"
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    return DeviceUnavailable(
        f"rank {printable(os.environ['RANK'])} of {os.environ['WORLD_SIZE']} on {socket.gethostname()} could not join"
        f" the others at {where}: {printable(words)}",
        fix=fix,
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def timeout() -> timedelta:
    """How long a rank waits for the others."""
    words = os.environ.get("HOTLOOP_RANK_TIMEOUT", "")
    try:
        return timedelta(seconds=float(words or TIMEOUT))
    except (ValueError, OverflowError) as error:
        raise BadArgument(
            f"HOTLOOP_RANK_TIMEOUT={printable(words)!r} is no number of seconds",
            fix=f"give seconds, such as {TIMEOUT:g}",
        ) from error


def reason_of_collective(error: BaseException) -> str | None:
    """Why a collective failed, as PyTorch says it; None for any other error."""
    if not isinstance(error, dist.DistError):
        if type(error) is not RuntimeError:
            return None
        inner = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not (inner and inner[-1] in COLLECTIVES) and GLOO.search(str(error)) is None:
            return None
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return WHERE.sub("", first).partition(" This is typically")[0]
