"""Throughput against ranks on this machine, what of it is communication, and what the model makes of more ranks.

Each number of ranks has its own processes, all started at once; they take turns, so that whatever else the machine
does hits all alike. This file is also the program of a rank: it gets commands from stdin and answers on stdout.
"""

import json
import math
import os
import select
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.about import commit, hardware, versions
from harness.contestants.by_hand import to
from harness.contestants.hot import loop_of
from harness.scaling_records import DDP, LOOP, MeasuredRanks, ModelledRanks, Repeats, ScalingBenchmark
from harness.workloads import Workload, workload
from hotloop.apps.simulate.scaling import (
    PARALLEL,
    CollectiveFit,
    GradientReady,
    MeasuredCluster,
    RankStep,
    buckets,
    cluster,
    fitted,
    scaled,
)
from hotloop.device.clock import Clock, synchronize
from hotloop.errors import BadArgument, HotloopError
from hotloop.levers import repeated_blocks
from hotloop.printing.text import duration, plural, printable
from hotloop.ranks.group import ranks_of
from hotloop.scripts.as_main import interpreter
from hotloop.scripts.children import Child

Tell = Callable[[str], None]
LINKS = ("nvlink4,ndr400", "nvlink3,hdr200", "pcie4,ethernet100", "pcie4,ethernet25", "ethernet10")
GPUS = tuple(2**power for power in range(1, 11))  # 2 to 1,024
SIZES = tuple(4**power * 2**10 for power in range(1, 8))  # bytes of the all-reduces: 4 KiB to 16 MiB
LEAST_SECONDS = 1.0  # of a turn
QUIET, MORE = 0.05, 4  # share of the cores that others may use in a turn; times as many turns where they use more
WARMUP = 3  # steps
_BESIDE = str(Path(__file__).parents[1])  # where a child finds this package
LONGEST = 600.0  # seconds for an answer, after which a rank is taken to hang


@dataclass(frozen=True)
class ScalingSetup:
    """What to measure."""

    workload: str
    device: torch.device
    ranks: tuple[int, ...] = (1, 2)
    repeats: int = 5
    quick: bool = False
    seed: int = 0
    threads: int | None = None  # of each rank; None: the cores, shared by the most ranks

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise BadArgument(f"repeats={self.repeats}", fix="give a whole number of at least 1; 5 show the spread")
        if not self.ranks or min(self.ranks) < 1:
            raise BadArgument(f"ranks={self.ranks}", fix="give whole numbers of at least 1: 1,2")
        if self.device.type == "cuda" and max(self.ranks) > (there := torch.cuda.device_count()):
            raise BadArgument(
                f"{max(self.ranks)} ranks, and this machine has {plural(there, 'GPU')}",
                fix=f"measure at most {there}; the model tells of more. Or measure on the CPU: --devices cpu",
            )


class GroupFailed(HotloopError):
    """A rank of a measurement has failed."""


def run_scaling(setup: ScalingSetup, *, command: str = "", tell: Tell = lambda _: None) -> ScalingBenchmark:
    """Measure each number of ranks in turns, then ask the model about more."""
    started = datetime.now(UTC)
    cores = _cores()
    ranks = sorted({1, *setup.ranks})  # one rank is what all are compared with
    threads = setup.threads or max(1, cores // max(ranks))
    failures: list[str] = []
    with ExitStack() as stack:
        groups = [stack.enter_context(_Group(n, setup, threads)) for n in ranks]
        tell(f"{setup.workload}: {plural(sum(ranks), 'process', 'processes')} of {plural(threads, 'thread')} start")
        for group in groups:
            about = group.begin()
            failures += [f"{plural(group.ranks, 'rank')}: {printable(why)}" for why in group.failures]
        turns, others = _turns(groups, setup, tell)
        step = RankStep.from_json(groups[0].ask({"do": "parts", "repeats": setup.repeats})[0]["step"])
        watched = _Others([pid for group in groups for pid in group.pids])
        sizes = sorted({*(SIZES[:4] if setup.quick else SIZES), *(held for held, _ in buckets(step.gradients))})
        fits = [_collectives(group, setup, sizes, tell) for group in groups if group.ranks > 1]
        others = max(others, watched.share() if fits else 0.0)
    alone = statistics.median(turns[1, DDP])
    step = _lasting(step, alone)
    overlap = 1.0 if setup.device.type == "cuda" else min(1.0, max(0, cores - max(ranks) * threads) / max(ranks))
    return ScalingBenchmark(
        hardware=hardware([setup.device]),
        command=command,
        date=started.isoformat(timespec="seconds"),
        commit=commit(),
        versions=versions(),
        workload=setup.workload,
        device=str(setup.device),
        backend=about["backend"] or "none",
        unit=about["unit"],
        threads=threads,
        cores=cores,
        repeats=setup.repeats,
        overlap=overlap,
        others=others,
        step=step,
        measured=(
            *(_measured(turns, n, step, fits, overlap) for n in ranks),
            *(_rates(turns, n, step, LOOP) for n in ranks if (1, LOOP) in turns and (n, LOOP) in turns),
        ),
        fits=tuple(fits),
        modelled=tuple(
            ModelledRanks(parallel, joined, tuple(scaled(step, joined, n, parallel) for n in GPUS))
            for joined in map(cluster, LINKS)
            for parallel in PARALLEL
        ),
        failures=tuple(failures),
        note=about["note"],
        quick=setup.quick,
    )


UNSYNCED, WAITING = "no_sync", "waiting"
Turns = dict[tuple[int, str], list[float]]  # ranks and way → seconds of a step in each turn


def _turns(groups: "Sequence[_Group]", setup: ScalingSetup, tell: Tell) -> tuple[Turns, float]:
    """Seconds of a step in each turn, and the share of the cores that other programs used meanwhile.

    A round is a turn of all groups, each in all its ways. Where others use the cores there are more rounds than asked
    for, and the quietest of them count.
    """
    rounds: list[tuple[float, dict[tuple[int, str], float]]] = []
    least = 0.0 if setup.quick else LEAST_SECONDS
    most = setup.repeats if setup.quick else MORE * setup.repeats
    while len(rounds) < most and sum(others <= QUIET for others, _ in rounds) < setup.repeats:
        watched, taken = _Others([pid for group in groups for pid in group.pids]), {}
        for group in groups:
            for way in group.ways:
                steps = max(2, math.ceil(least / group.pace))
                replies = group.ask({"do": "time", "way": way, "steps": steps})
                taken[group.ranks, way] = max(reply["seconds"] for reply in replies) / steps
                if way == UNSYNCED and setup.device.type == "cpu":
                    taken[group.ranks, WAITING] = _waiting([reply["each"] for reply in replies])
        rounds.append((watched.share(), taken))
        said = ", ".join(f"{plural(group.ranks, 'rank')} {duration(taken[group.ranks, DDP])}" for group in groups)
        busy = f"; other programs used {rounds[-1][0]:.0%} of the cores" if rounds[-1][0] > QUIET else ""
        tell(f"turn {len(rounds)}: a step of {said}{busy}")
    kept = sorted(rounds, key=lambda one: one[0])[: setup.repeats]
    turns = {key: [taken[key] for _, taken in kept] for key in kept[0][1]}
    return turns, statistics.fmean(others for others, _ in kept)


def _waiting(ranks: Sequence[Sequence[float]]) -> float:
    """Seconds by which steps would be longer if in each of them all ranks waited for the slowest.

    >>> round(_waiting([[0.1, 0.3], [0.3, 0.1]]), 3)
    0.1
    """
    together = statistics.fmean(max(step) for step in zip(*ranks, strict=True))
    return together - max(statistics.fmean(steps) for steps in ranks)


def _collectives(group: "_Group", setup: ScalingSetup, sizes: Sequence[int], tell: Tell) -> CollectiveFit:
    """All-reduces of several sizes among these ranks, those of DDP's buckets among them, and the line through them."""
    medians = []
    for size in sizes:
        calls = max(3, min(50, 2**24 // size))
        times = [
            max(reply["seconds"] for reply in group.ask({"do": "reduce", "bytes": size, "calls": calls})) / calls
            for _ in range(max(setup.repeats, 3))
        ]
        medians.append(statistics.median(times))
    line = fitted(group.ranks, sizes, medians)
    tell(f"all-reduce of {group.ranks} ranks: {duration(line.latency)} + bytes / {line.rate / 1e9:.3g} GB/s")
    return line


def _lasting(step: RankStep, seconds: float) -> RankStep:
    """The same step, as long as it was measured without looking into it."""
    by = seconds / step.seconds
    return replace(step, forward=by * step.forward, backward=by * step.backward, update=by * step.update)


def _measured(turns: Turns, ranks: int, step: RankStep, fits: Sequence[CollectiveFit], overlap: float) -> MeasuredRanks:
    """Plain DDP on so many ranks, beside the prediction."""
    synced, found = turns[ranks, DDP], _rates(turns, ranks, step, DDP)
    if ranks == 1:
        return found
    unsynced, waiting = turns[ranks, UNSYNCED], turns.get((ranks, WAITING))
    line = next(fit for fit in fits if fit.gpus == ranks)
    return replace(
        found,
        unsynced=_spread(unsynced),
        communication=_spread([with_it - without for with_it, without in zip(synced, unsynced, strict=True)]),
        predicted=scaled(step, MeasuredCluster.of(line), ranks, overlap=overlap),
        waiting=None if waiting is None else _spread(waiting),
    )


def _rates(turns: Turns, ranks: int, step: RankStep, way: str) -> MeasuredRanks:
    taken, alone = turns[ranks, way], turns[1, way]
    return MeasuredRanks(
        ranks=ranks,
        way=way,
        step=_spread(taken),
        rate=_spread([ranks * step.units / each for each in taken]),
        efficiency=_spread([one / each for one, each in zip(alone, taken, strict=True)]),
    )


def _spread(values: Sequence[float]) -> Repeats:
    return Repeats(statistics.median(values), min(values), max(values))


class _Others:
    """What other programs take of the cores, from now on."""

    def __init__(self, ours: Sequence[int]) -> None:
        self._ours = [psutil.Process(pid) for pid in (os.getpid(), *ours)]
        self._start = self._now()

    def share(self) -> float:
        """Of all cores of the machine, 0 to 1."""
        seconds, busy, own = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return min(max((busy - own) / (seconds * (psutil.cpu_count() or 1)), 0.0), 1.0)

    def _now(self) -> tuple[float, float, float]:
        """The clock, and seconds of cores at work: of all programs, and of ours."""
        every = psutil.cpu_times()
        own = [process.cpu_times() for process in self._ours]
        busy = sum(every) - every.idle - getattr(every, "iowait", 0.0) - getattr(every, "guest", 0.0)
        return time.monotonic(), busy, sum(each.user + each.system for each in own)


def _cores() -> int:
    """The cores that these processes may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Group:
    """The processes of one number of ranks; they wait for commands between their turns."""

    def __init__(self, ranks: int, setup: ScalingSetup, threads: int) -> None:
        self.ranks = ranks
        self.ways = (DDP,)
        self.failures: list[str] = []
        self.pace = 1.0  # seconds of a step
        self._setup, self._threads = setup, threads
        self.pids: list[int] = []
        self._pipes: list[tuple[int, int]] = []  # for requests, and for answers
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        setup = self._setup
        work = {
            "workload": setup.workload,
            "device": setup.device.type,
            "quick": setup.quick,
            "seed": setup.seed,
            "threads": self._threads,
        }
        port = _free_port()
        with ExitStack() as stack:
            for rank in range(self.ranks):
                (stdin, requests), (answers, stdout) = os.pipe(), os.pipe()
                stack.callback(os.close, answers)
                program = [*interpreter("harness.scaling"), json.dumps(work)]
                child = Child(program, stdin=stdin, stdout=stdout, env=self._environment(rank, port))
                stack.enter_context(child)
                stack.callback(os.close, requests)  # which ends it
                os.close(stdin)
                os.close(stdout)
                self._pipes.append((requests, answers))
                self.pids.append(child.pid)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """The answers of all ranks."""
        for requests, _ in self._pipes:
            with suppress(BrokenPipeError):  # then there is no answer either
                os.write(requests, json.dumps(command).encode() + b"\n")
        ranks = {answers: rank for rank, (_, answers) in enumerate(self._pipes)}
        said = dict.fromkeys(ranks, b"")
        replies: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + LONGEST
        while len(replies) < self.ranks:  # whichever comes first: where one fails, the others wait for it
            ready, _, _ = select.select([pipe for pipe in ranks if ranks[pipe] not in replies], [], [], 1.0)
            for pipe in ready:
                part = os.read(pipe, 2**16)
                said[pipe] += part
                if not part:
                    raise self._failed(ranks[pipe], "it ended, and its output says why")
                if said[pipe].endswith(b"\n"):
                    reply = replies[ranks[pipe]] = json.loads(said[pipe])
                    if "error" in reply:
                        raise self._failed(ranks[pipe], reply["error"])
            if time.monotonic() > deadline:
                raise self._failed(min(set(ranks.values()) - set(replies)), f"no answer in {duration(LONGEST)}")
        return [replies[rank] for rank in range(self.ranks)]

    def begin(self) -> dict[str, Any]:
        """Get all ranks ready; what the first says of itself."""
        every = self.ask({"do": "begin"})
        self.pace, self.failures = every[0]["seconds"], every[0]["failures"]
        self.ways = tuple(way for way in every[0]["ways"] if all(way in about["ways"] for about in every))
        return every[0]

    def _failed(self, rank: int, why: str) -> GroupFailed:
        return GroupFailed(
            f"rank {rank} of {self.ranks} failed: {printable(why)}",
            fix="run it again with HOTLOOP_DEBUG=1 for the traceback, or try another workload",
        )

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """What torchrun would tell a rank, and threads as for all others."""
        return {
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",  # all of them are on this machine
            **os.environ,
            "PYTHONPATH": os.pathsep.join([_BESIDE, os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": str(self._threads),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


class _Rank:
    """One rank of a measurement: the workload's step in each way, on one batch that stays on the device."""

    def __init__(self, work: Workload, device: torch.device) -> None:
        self.ranks, choice = ranks_of(device)
        self.device, self.work = choice.device, work
        self.group = None if self.ranks is None else self.ranks.group
        self.failures: list[str] = []
        self._steps: dict[str, Callable[[], object]] = {}

    @property
    def backend(self) -> str:
        return "" if self.ranks is None else str(dist.get_backend(self.group))

    def begin(self) -> dict[str, Any]:
        """Make the steps of all ways, and warm them up."""
        self._make_plain()
        self._make_loop()
        for step in self._steps.values():
            for _ in range(WARMUP):
                step()
        seconds = self.time(DDP, 2)[0] / 2
        work = self.work
        return {
            "seconds": seconds,
            "ways": list(self._steps),
            "failures": self.failures,
            "backend": self.backend,
            "unit": work.unit,
            "note": work.note,
        }

    def _make_plain(self) -> None:
        parts = self.work.parts()
        updates = parts.updates
        if len(updates) > 1:
            raise BadArgument(f"{self.work.name} has several objectives", fix="choose a workload with one")
        ((objective, optimizer),) = updates
        self.model = model = parts.model.to(self.device).train()
        self.batch = batch = parts.transformed(to(next(iter(parts.loader)), self.device))
        self._plain = objective, optimizer
        called: nn.Module = model
        if self.ranks is not None:
            called = DistributedDataParallel(model, process_group=self.group)

        def step() -> None:
            optimizer.zero_grad()
            objective(called, batch).backward()
            optimizer.step()

        def unsynced() -> None:
            assert isinstance(called, DistributedDataParallel)
            with called.no_sync():
                step()

        self._steps[DDP] = step
        if self.ranks is not None:
            self._steps[UNSYNCED] = unsynced

    def _make_loop(self) -> None:
        """The same through `hotloop.Loop`, which joins the other ranks by itself."""
        try:
            parts = self.work.parts()
            loop = loop_of(parts, self.device, "plain")
            for _ in range(WARMUP):
                loop.step(self.batch)
        except Exception as error:  # noqa: BLE001  # what it cannot do is told, and the others go on
            self.failures.append(f"{LOOP}: {type(error).__name__}: {error}")
            return
        self._steps[LOOP] = lambda: loop.step(self.batch)

    def time(self, way: str, steps: int) -> tuple[float, list[float]]:
        """Seconds of so many steps, which all ranks begin together; and of each, as the host sees it."""
        step = self._steps[way]
        self._meet()
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        synchronize(self.device)
        return time.perf_counter() - marks[0], [end - start for start, end in pairwise(marks)]

    def reduce(self, size: int, calls: int) -> float:
        """Seconds of so many all-reduces."""
        tensor = torch.zeros(max(size // 4, 1), device=self.device)
        dist.all_reduce(tensor, group=self.group)
        self._meet()
        start = time.perf_counter()
        for _ in range(calls):
            dist.all_reduce(tensor, group=self.group)
        synchronize(self.device)
        return time.perf_counter() - start

    def parts(self, repeats: int) -> RankStep:
        """Forward, backward and update, and when in backward each gradient was there; medians of the repeats."""
        objective, optimizer = self._plain
        seen: list[tuple[list[float], dict[int, float]]] = []
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for _ in range(max(repeats, 3)):
            optimizer.zero_grad()
            laps: dict[int, Any] = {}
            synchronize(self.device)
            clock = Clock(self.device)
            with _hooked(parameters, clock, laps):
                loss = objective(self.model, self.batch)
                forward = clock.lap()
                loss.backward()
                backward = clock.lap()
            optimizer.step()
            ends = [clock.seconds(lap) for lap in (forward, backward, clock.lap())]
            seen.append((ends, {number: clock.seconds(lap) for number, lap in laps.items()}))
        forward, backward, end = (statistics.median(ends[n] for ends, _ in seen) for n in range(3))
        taken = max(backward - forward, 1e-9)
        ready = {n: statistics.median(each[n] for _, each in seen if n in each) for n in seen[-1][1]}
        blocks = _blocks(self.model)
        gradients = [
            GradientReady(
                parameters[n].numel() * parameters[n].element_size(),
                min(max((ready[n] - forward) / taken, 0.0), 1.0),
                blocks.get(id(parameters[n]), ""),
            )
            for n in sorted(ready, key=ready.__getitem__)
        ]
        units = self.work.batch * self.work.units_per_item
        copies = self._copies([p.grad for p in parameters if p.grad is not None], max(repeats, 3))
        return RankStep(forward, taken, max(end - backward, 0.0), tuple(gradients), float(units), copies)

    def _copies(self, gradients: Sequence[torch.Tensor], repeats: int) -> float:
        """Seconds in which all gradients are copied into buckets, divided by the number of ranks, and copied back."""
        rooms = [torch.empty_like(gradient) for gradient in gradients]
        taken = []
        for _ in range(1 + repeats):
            synchronize(self.device)
            start = time.perf_counter()
            for gradient, room in zip(gradients, rooms, strict=True):
                torch.mul(gradient, 1.0, out=room)
            for gradient, room in zip(gradients, rooms, strict=True):
                gradient.copy_(room)
            synchronize(self.device)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    def _meet(self) -> None:
        synchronize(self.device)
        if self.ranks is not None:
            dist.barrier(group=self.group)
            synchronize(self.device)


@contextmanager
def _hooked(parameters: Sequence[nn.Parameter], clock: Clock, laps: dict[int, Any]) -> Iterator[None]:
    """Note when each gradient has come, by the number of its parameter."""

    def came(number: int, _parameter: torch.Tensor) -> None:
        laps[number] = clock.lap()

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(came, number))
        for number, parameter in enumerate(parameters)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _blocks(model: nn.Module) -> dict[int, str]:
    """The repeated block that each parameter is in, by its identity."""
    names = {id(module): name for name, module in model.named_modules()}
    return {id(parameter): names[id(block)] for block in repeated_blocks(model) for parameter in block.parameters()}


def main(argument: str) -> None:
    """Be a rank: answer each command of stdin with a line on stdout, until there is no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed must not look like an answer
    given = json.loads(argument)
    torch.set_num_threads(given["threads"])
    device = torch.device(given["device"])
    rank: _Rank | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if rank is None:
                work = workload(given["workload"], device, quick=given["quick"], seed=given["seed"])
                rank = _Rank(work, device)
            reply = _answer(rank, command)
        except Exception as error:  # noqa: BLE001  # it is told to whoever asked
            if os.environ.get("HOTLOOP_DEBUG"):
                traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def _answer(rank: _Rank, command: dict[str, Any]) -> dict[str, Any]:
    if command["do"] == "begin":
        return rank.begin()
    if command["do"] == "time":
        return dict(zip(("seconds", "each"), rank.time(command["way"], command["steps"]), strict=True))
    if command["do"] == "reduce":
        return {"seconds": rank.reduce(command["bytes"], command["calls"])}
    return {"step": rank.parts(command["repeats"]).to_json()}


if __name__ == "__main__":
    main(sys.argv[1])
