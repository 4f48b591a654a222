"""A rank that dies, hangs or does something else is named by the others, and wrong set-ups end in words."""

import json
import re
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from hotloop._torch import store_of_ranks
from hotloop.apps.top.ranks import RankRun, runs_in
from hotloop.device import Choice
from hotloop.errors import BadArgument, DeviceUnavailable, PlanWarning
from hotloop.ranks.group import Ranks, ranks_of
from hotloop.ranks.heartbeat import Beat, Heartbeat, RankLost
from hotloop.run.rank_file import RankFile
from hotloop.step.across import UpdateTimes

from ..thorough import some
from ..warm import Warm
from .conftest import Ended, Launch, Launcher, free_port, until

HERE = Path(__file__).parent
FAILING = HERE / "failing.py"
HOST = socket.gethostname()


def within(seconds: float, **more: str) -> Callable[[int], dict[str, str]]:
    return lambda rank: {"HOTLOOP_RANK_TIMEOUT": str(seconds), **more}


def words(ended: Ended) -> str:
    """The error that ended a rank, without the lines before it."""
    found = re.findall(r"^(?:\[rank\d\]:\s*)?hotloop\.[\w.]+: (?:.|\n)*", ended.err, re.MULTILINE)
    assert found, ended.err
    return " ".join(found[-1].split())


def after_others(run: Launch, hung: int) -> list[Ended]:
    """How the ranks end of which one hangs, which is ended when the others have been."""
    others = [run.folder / f"err {rank}" for rank in range(len(run.ranks)) if rank != hung]
    until(lambda: all("fix:" in file.read_text(encoding="utf-8") for file in others))
    run.kill(hung)
    return run.wait()


# A rank that is lost


@pytest.mark.parametrize("dead", [0, 2])
def test_a_rank_that_dies_is_named(launch: Launcher, dead: int) -> None:
    ended = launch(FAILING, "killed", str(dead), "7", ranks=3).wait()

    for rank in {0, 1, 2} - {dead}:
        said = words(ended[rank])
        assert "RankLost" in said
        assert f"rank {dead} on {HOST} is gone: its process" in said
        assert re.search(
            r"its last word, .{3,9} ago, came from batch 6 of epoch 1 after step 6, at \S*failing\.py:\d+ in", said
        )
        assert f"rank {rank} of 3 on {HOST} was in batch 6 of epoch 1 after step 6, at " in said
        assert "resume=True" in said
        assert "--max-restarts" in said
        assert "The above exception was the direct cause" in ended[rank].err
        assert f"rank {({0, 1, 2} - {dead, rank}).pop()} on" not in said


def test_a_rank_that_is_stopped_is_named_within_the_timeout(launch: Launcher) -> None:
    run = launch(FAILING, "stopped", "1", ranks=3, each=within(3))
    began = time.monotonic()
    ended = after_others(run, 1)

    assert time.monotonic() - began < 30
    for rank in (0, 2):
        assert f"rank 1 on {HOST} is stopped: its process" in words(ended[rank])


def test_a_rank_that_is_late_is_named_at_first_and_in_the_end(launch: Launcher) -> None:
    ended = after_others(launch(FAILING, "endless", ranks=3, each=within(3)), 2)

    for rank in (0, 1):
        late = rf"rank 2 on {HOST} is late: for \d+ s it has been in batch 4 of epoch 1 after step 5"
        assert re.search(late + r", at \S*failing\.py:\d+ in __getitem__", words(ended[rank]))
    waits = rf"RankWarning: ranks have waited \d s for rank 2 on {HOST}, in batch 4 of epoch 1 after step 5, at "
    assert re.search(waits, ended[0].err)
    assert "RankWarning" not in ended[1].err


@pytest.mark.parametrize("failed", [0, 1])
def test_a_rank_that_fails_is_named_with_its_error(launch: Launcher, failed: int) -> None:
    ended = launch(FAILING, "raised", str(failed)).wait()

    assert "KeyError: 'no such row'" in ended[failed].err
    said = words(ended[1 - failed])
    assert f"rank {failed} on {HOST} ended with KeyError: 'no such row', in batch 4 of epoch 1" in said
    assert "in objective" in said


def test_a_rank_that_evaluates_alone(launch: Launcher) -> None:
    said = [words(each) for each in launch(FAILING, "apart", "0", each=within(3)).wait()]

    lines = FAILING.read_text().splitlines()
    evaluates, steps = (
        next(n for n, line in enumerate(lines, 1) if call in line) for call in ("loop.evaluate(", "loop.step(")
    )
    places = [
        f"batch {4 + n} of epoch 1 after step 5, at {FAILING}:{line} in" for n, line in ((0, evaluates), (1, steps))
    ]
    for rank, (here, there) in enumerate((places, places[::-1])):
        assert f"RankLost: ranks do different things: rank {rank} is in {here}" in said[rank]
        assert f"but rank {1 - rank} on {HOST} is in {there}" in said[rank]
        assert "fix: call fit and evaluate on all ranks, not only on rank 0" in said[rank]


def test_different_numbers_of_batches_of_unknown_length(launch: Launcher) -> None:
    ended = launch(FAILING, "uneven", each=within(20)).wait()

    for each in ended:
        assert "RankLost" in words(each)
        assert f"different numbers of batches: rank 0 of 2 on {HOST} had 4 batches in epoch 1" in words(each)
        assert f"rank 1 on {HOST} is in batch 4 of epoch 1" in words(each)


# Out of memory on one rank


MEMORY = [("forward", "5", "uneven"), ("backward", "1", "uneven"), ("forward", "1", "even")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Callable[[str], tuple[str, Any]]:
    """How far a training comes where memory does not run out, and its weights."""

    @cache
    def ends(rows: str) -> tuple[str, Any]:
        folder = tmp_path_factory.mktemp(rows)
        ended = Launch(warm, FAILING, "nothing", "1", "5", rows, cwd=folder).wait()
        assert [each.code for each in ended] == [0, 0], ended[0].err
        (step, times) = ended[0].out.split()[1:]
        assert times == "0"
        return step, torch.load(folder / "nothing 0.pt")

    return ends


@pytest.mark.parametrize(("scene", "step", "rows"), some(MEMORY, MEMORY[:2]))
def test_memory_that_runs_out_on_one_rank_alone(
    launch: Launcher, tmp_path: Path, undisturbed: Callable[[str], Any], scene: str, step: str, rows: str
) -> None:
    expected, weights = undisturbed(rows)
    ended = launch(FAILING, scene, "1", step, rows, each=within(3)).wait()

    assert [each.code for each in ended] == [0, 0], ended[1].err
    assert [int(each.out.split()[-1]) > 0 for each in ended] == [False, True]  # times that memory ran out
    assert [each.out.split()[1] for each in ended] == [expected, expected]
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"{scene} {rank}.pt"), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scene", ["backward", "sent"])
def test_memory_that_runs_out_in_a_backward_pass_that_sends_gradients(launch: Launcher, scene: str) -> None:
    ended = launch(FAILING, scene, each=within(3)).wait()

    assert "DoesNotFit" in words(ended[1])
    assert f"memory ran out on rank 1 of 2 on {HOST} when other ranks had begun" in words(ended[1])
    assert f"rank 1 on {HOST} ended with hotloop.errors.DoesNotFit" in words(ended[0])


# Wrong set-ups


@pytest.mark.parametrize(
    ("scene", "what"),
    {
        "model": "model",
        "plan": "plan",
        "unequal": "number of batches",
        "rate": f"lr of SGD than rank 0 on {HOST}: 0.2 instead of 0.1",
        "dropout": "setting of Dropout layers",
        "loss": f"loss than rank 0 on {HOST}: MultiMarginLoss instead of CrossEntropyLoss",
    }.items(),
)
def test_ranks_with_other_settings_do_not_begin(launch: Launcher, scene: str, what: str) -> None:
    for each in launch(FAILING, scene).wait():
        assert "RanksDiffer" in words(each)
        assert f"rank 1 on {HOST} has another {what}" in words(each)


@pytest.mark.parametrize("scene", ["writes", "saves", "loop"])
def test_weights_that_drift_apart_end_the_run_with_the_names_of_the_ranks(
    launch: Launcher, scene: str, tmp_path: Path
) -> None:
    ended = launch(FAILING, scene, ranks=3 if scene == "writes" else 2).wait()

    odd, others = ("rank 2", "ranks 0, 1") if scene == "writes" else ("rank 1", "rank 0")
    for each in ended:
        assert each.code != 0
        assert f"{odd} on {HOST} has other weights than {others}: 0.0.weight, by " in words(each)
        assert "fix: look for code that only some ranks run" in words(each)
    assert not list(tmp_path.glob("saved/step-*")), "what is apart is not saved"


def test_weights_that_differ_by_rounding_are_a_warning(launch: Launcher) -> None:
    ended = launch(FAILING, "rounds").wait()

    assert [each.code for each in ended] == [0, 0]
    assert ended[0].err.count("has other weights than rank 0") == 1
    assert "as rounding on different hardware" in ended[0].err


def test_ranks_with_another_script(warm: Warm, tmp_path: Path) -> None:
    port = str(free_port())
    runs = []
    for rank, comment in enumerate(("", "# a newer version\n")):
        folder = tmp_path / str(rank)
        folder.mkdir()
        shutil.copy(HERE / "scenes.py", folder)
        (folder / "failing.py").write_text(FAILING.read_text() + comment)
        settings = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
        runs.append(Launch(warm, folder / "failing.py", "nothing", ranks=1, cwd=folder, each=lambda _, s=settings: s))

    for run in runs:
        (ended,) = run.wait()
        assert f"rank 1 on {HOST} has another script than rank 0" in words(ended)


def test_others_that_cannot_be_joined(warm: Warm, tmp_path: Path) -> None:
    """A port that another program has, one that nobody has, and a host that does not answer."""

    def begin(name: str, ranks: int, **settings: str) -> Launch:
        (tmp_path / name).mkdir()
        return Launch(warm, FAILING, "nothing", ranks=ranks, cwd=tmp_path / name, each=within(1, **settings))

    alone = {"RANK": "1", "WORLD_SIZE": "2"}
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as other_program:
        port = other_program.getsockname()[1]
        taken = begin("taken", 2, MASTER_PORT=str(port))
        nobody = [(at, begin(at, 1, MASTER_ADDR=at, **alone)) for at in ("127.0.0.1", "192.0.2.1")]
        ended = taken.wait()
    for rank, each in enumerate(ended):
        assert f"rank {rank} of 2 on {HOST} could not join the others at 127.0.0.1:{port}" in words(each)
    assert f"fix: port {port} belongs to another program: give all ranks another MASTER_PORT" in words(ended[0])
    assert "nothing there has answered as a rank does for 1 s" in words(ended[1])
    for address, run in nobody:
        (each,) = run.wait()
        assert f"rank 1 of 2 on {HOST} could not join the others at {address}:" in words(each)
        assert "firewall" in words(each)
    assert time.monotonic() - began < 20


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, **more: str) -> None:
    settings = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**settings, **more}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("WORLD_SIZE", "two"), ("RANK", "first"), ("RANK", "2"), ("LOCAL_RANK", "-1"), ("MASTER_PORT", "http")),
        ("HOTLOOP_RANK_TIMEOUT", "soon"),
    ],
)
def test_variables_that_make_no_sense(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    be_rank(monkeypatch, 0, 2, **{"LOCAL_RANK": "0", name: value})
    with pytest.raises(BadArgument, match=name):
        ranks_of("cpu")


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(monkeypatch, 1, 2, LOCAL_RANK="1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for want in (None, "cuda"):
        with pytest.raises(DeviceUnavailable, match=r"rank 1 is process 1 .* has 1 GPU") as found:
            ranks_of(want)
        assert "hotloop launch --gpus 1" in str(found.value)


@pytest.mark.parametrize("rank", [0, 5])
def test_without_a_local_rank_each_rank_has_a_gpu_of_its_own(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `mp.spawn`: two hosts with four GPUs each."""
    be_rank(monkeypatch, rank, 8)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("SLURM_LOCALID", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr("hotloop.ranks.group.pick", lambda want: Choice(torch.device(want), "fp32", "asked for"))
    monkeypatch.setattr("hotloop.ranks.group._joined", lambda device, local: Ranks(rank, 8, local, "here", device))
    monkeypatch.setattr("hotloop.ranks.group._ranks", None)

    with pytest.warns(PlanWarning, match="LOCAL_RANK is not set") if rank == 0 else nullcontext():
        ranks, choice = ranks_of("cuda")

    assert str(choice.device) == f"cuda:{rank % 4}"
    assert ranks is not None
    assert ranks.local_rank == rank % 4


# The words of ranks

BROKEN = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


def heartbeat(monkeypatch: pytest.MonkeyPatch, store: object) -> Heartbeat:
    monkeypatch.setattr("hotloop.ranks.heartbeat.store_of_ranks", lambda timeout: store)
    monkeypatch.setattr("hotloop.ranks.heartbeat.PERIOD", 0.05)
    monkeypatch.setattr("hotloop.ranks.heartbeat.BEAT_PATIENCE", 0.1)
    return Heartbeat(Ranks(1, 2, 1, "here", torch.device("cpu")))


def test_a_thread_tells_where_a_rank_is_and_once_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop of one's own over `batches` ends without an error, after an evaluation in it has lost another rank."""
    store = HashStore()

    def told() -> Beat:
        return Beat(**json.loads(store.get("hotloop/rank 1")))

    beats, before = heartbeat(monkeypatch, store), threading.active_count()
    with beats:
        first = told()
        until(lambda: told().time > first.time)
        assert re.search(r"conftest\.py:\d+ in until|test_failures\.py:\d+ in", told().line)
    assert threading.active_count() == before
    assert told().ended == "done"
    with beats, pytest.raises(RankLost), beats:
        raise RuntimeError(BROKEN)
    assert told().ended == "lost"


def test_ranks_that_can_tell_nothing_go_on_and_end_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankLost, match="another rank is lost") as found, heartbeat(monkeypatch, None):
        raise RuntimeError(BROKEN)
    assert isinstance(found.value.__cause__, RuntimeError)
    assert "its collective failed: Connection closed by peer" in str(found.value)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), heartbeat(monkeypatch, None):
        torch.ones(2, 3) @ torch.ones(2, 3)


def test_outside_of_a_run_there_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    assert store_of_ranks(1.0) is None
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_get_default_store")
    assert store_of_ranks(1.0) is None


def test_each_rank_writes_for_top_how_far_and_how_fast_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOTLOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("hotloop.ranks.heartbeat.PERIOD", 0.02)
    store = HashStore()
    monkeypatch.setattr("hotloop.ranks.heartbeat.store_of_ranks", lambda timeout: store)
    several = [Ranks(rank, 2, rank, "here", torch.device("cpu")) for rank in range(2)]
    began, folder = time.monotonic(), tmp_path / "cache" / "ranks"
    beats = [
        Heartbeat(
            ranks, show=RankFile(ranks, lambda: int(1000 * (time.monotonic() - began)), lambda pace=pace: pace).write
        )
        for ranks, pace in zip(several, [(0.01, 0.03), (0.04, 0.0)], strict=True)
    ]
    found: list[RankRun] = []

    def is_known() -> bool:
        found[:] = runs_in(folder)
        known = [each.items_per_second and each.own for run in found for each in run.by_rank]
        return len(known) == 2 and all(known)

    with beats[1], beats[0]:
        until(is_known)
        assert len([path for path in folder.iterdir() if path.suffix == ".json"]) == 2, "a file for each rank"
    [run] = found
    assert run.straggler == 1
    assert [each.waiting for each in run.by_rank] == pytest.approx([75.0, 0.0])
    assert all(500 < (each.items_per_second or 0) < 2000 for each in run.by_rank)
    assert [*folder.iterdir()] == [], "nothing is left of a run that has ended"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_what_the_device_has_not_done_yet_is_in_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    times = UpdateTimes(torch.device("cpu"))
    for _ in range(9):
        times.sent()
        times.synchronized()
    assert times.medians() is not None
    monkeypatch.setattr("hotloop.device.clock.Clock.has_reached", lambda clock, lap: False)
    assert times.medians() is None, "and nobody waits for it"
