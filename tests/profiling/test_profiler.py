"""`Profiler` on real loops."""

import gzip
import io
import json
import re
import time
from functools import partial

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hotloop
from hotloop.data.worker_count import LoadingLimits
from hotloop.errors import BadArgument
from hotloop.profiling.advice import Loading, advise
from hotloop.profiling.analysis import analyse
from hotloop.profiling.profile_record import Profile
from hotloop.profiling.profiler import Profiler
from hotloop.profiling.trace import events_in
from hotloop.report.profile_page import profile_page, profile_summary

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Slow(Dataset):
    """Forty milliseconds for two items."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.02)
        return torch.full((8,), float(index)), index % 2


def train(
    profiler: Profiler, data: Dataset, device: str, *, batch: int = 2, reads: bool = True, width: int = 16
) -> None:
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profiler:
        for inputs, targets in DataLoader(data, batch_size=batch):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            if reads:
                loss.item()  # read
            profiler.step()
            if profiler.done:
                break


def tensors(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 8), torch.randint(0, 2, (count,)))


@pytest.mark.parametrize("device", DEVICES)
def test_the_parts_add_up_to_the_time_of_the_steps(device: str) -> None:
    profiler = Profiler(device, steps=6, warmup=7)
    train(profiler, tensors(64), device)
    profile = profiler.profile
    assert profile.steps == len(profile.seconds) == 6
    assert profile.parts.total == pytest.approx(sum(profile.seconds), rel=0.02)
    assert sum(profile.parts.shares.values()) == pytest.approx(1)
    assert profile.median == sorted(profile.seconds)[2]
    assert profile.parts.compute > 0
    first, shares, *lines = str(profile).splitlines()
    assert first.startswith("a step takes ")
    assert first.endswith("the mean of 6 steps")
    assert "compute " in shares
    assert any("test_profiler.py:" in line for line in lines)


@pytest.fixture(scope="module")
def slow() -> Profile:
    """Of a loop that waits for its data most of the time."""
    profiler = Profiler("cpu", steps=4, warmup=1)
    train(profiler, Slow(), "cpu")
    return profiler.profile


def test_waiting_for_data_is_measured_and_told(slow: Profile) -> None:
    assert slow.data_known
    assert slow.parts.data >= 4 * 0.04  # sleeping takes at least as long as was asked for
    assert f"waits {slow.parts.shares['data']:.0%} of its time for data" in slow.advice[0].what
    number = re.search(r"num_workers=(\d+), ", slow.advice[0].fix)
    assert number
    assert 1 <= int(number[1]) <= LoadingLimits.here().cores


@pytest.mark.parametrize(
    ("loading", "cores", "has", "lacks"),
    [
        (Loading(), 2, "num_workers=2, ", "num_workers=3"),
        (Loading(workers=2), 2, "beforehand", "num_workers"),
        (Loading(workers=2), 8, "num_workers=8;", "persistent"),
        (Loading(batch_bytes=1 << 29), 9, "num_workers=2, ", "num_workers=8"),
        (Loading(in_memory=True), 3, "hotloop.Loop", "num_workers"),
    ],
)
def test_workers_are_advised_where_there_is_room_for_them_and_something_to_do(
    slow: Profile, loading: Loading, cores: int, has: str, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadingLimits, "here", lambda: LoadingLimits(cores=cores, room=1 << 30))
    first, *_ = advise(slow, loading)
    assert has in first.fix
    assert lacks not in first.fix


@pytest.mark.parametrize("kind", ["dataset", "list"])
def test_tensors_in_memory_are_known(kind: str) -> None:
    data = tensors(64)
    profiler = Profiler("cpu", steps=4, warmup=1)
    train(profiler, data if kind == "dataset" else [data[i] for i in range(64)], "cpu")
    told = [advice.fix for advice in profiler.profile.advice if "for data" in advice.what]
    assert not any("num_workers" in fix for fix in told)
    assert profiler._loading.in_memory


def test_operations_and_waits_have_the_persons_own_lines() -> None:
    before = DataLoader.__iter__
    profiler = Profiler("cpu", steps=3, warmup=7)
    train(profiler, tensors(64), "cpu", width=16)
    profile = profiler.profile
    assert DataLoader.__iter__ is before, "it leaves nothing behind"
    products = 2 * 2 * 8 * 16 + 2 * 2 * 16 * 2
    products += 2 * products - 2 * 2 * 8 * 16  # backward; the inputs have no gradient
    assert profile.flops == {"fp32": products}
    assert profile.rate == pytest.approx(products / profile.mean)
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    events = json.loads(gzip.decompress(profiler.trace))["traceEvents"]
    assert sum(event["name"] == "hotloop.step" for event in events) == 4
    forward = [o for o in profile.operations if o.name == "addmm"]
    assert forward[0].line.code.startswith("loss = nn.functional.cross_entropy(model(")
    assert forward[0].line.file.endswith("test_profiler.py")
    assert (forward[0].calls, forward[0].phase) == (2, "forward")
    assert len(profile.operations) == 10
    assert sum(o.line is not None for o in profile.operations) >= 6
    (wait,) = profile.waits
    assert wait.line.code == "loss.item()  # read"
    assert wait.calls == 1
    assert any("on a GPU the host waits there" in advice.what for advice in profile.advice)


def test_accumulation_is_one_step_and_data_that_no_loader_gives_is_unknown() -> None:
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    with Profiler("cpu", steps=3, warmup=6) as profiler:
        while not profiler.done:
            for _ in range(4):
                weight.square().sum().backward()
            optimizer.step()
            profiler.step()
    squares = [o for o in profiler.profile.operations if o.name == "pow" and o.phase == "forward"]
    assert squares[0].calls == 4
    assert not profiler.profile.data_known
    # not "no DataLoader gave the batches": hotloop.Loop keeps the data of one on the device, and asks it for nothing
    assert profiler.profile.notes[-1].startswith("No DataLoader was seen in these steps, so how long they wait")
    assert "unknown" in profiler.profile.notes[-1]


def test_a_loop_that_ends_early_gets_a_profile_of_what_there_was() -> None:
    profiler = Profiler("cpu", steps=50)
    train(profiler, tensors(10), "cpu")
    assert profiler.seen == 5
    assert 1 <= profiler.profile.steps <= 3
    assert "warm-up" in profiler.profile.notes[0]
    assert any(operation.line is not None for operation in profiler.profile.operations)
    profiler = Profiler("cpu")
    train(profiler, tensors(4), "cpu")
    with pytest.raises(BadArgument, match="only 2 training steps"):
        _ = profiler.profile


def test_a_loop_that_ends_in_the_middle_of_the_recording() -> None:
    profiler = Profiler("cpu", steps=50, warmup=6)
    train(profiler, tensors(40), "cpu")
    assert profiler.profile.steps == 20 - 7
    assert "13 recorded steps of the 50" in profiler.profile.notes[0]


def test_two_profilers_at_once_are_refused() -> None:
    with torch.profiler.profile(), pytest.raises(BadArgument, match="a profiler of its own"):
        train(Profiler("cpu", steps=2, warmup=1), tensors(64), "cpu")


@pytest.mark.parametrize(("steps", "warmup"), [(0, None), (5, 0), (-1, 3)])
def test_impossible_counts_are_refused(steps: int, warmup: int | None) -> None:
    with pytest.raises(BadArgument, match="at least 1"):
        Profiler(steps=steps, warmup=warmup)


def test_an_error_in_the_loop_passes_through_and_leaves_nothing() -> None:
    def fail(profiler: Profiler, after: int) -> None:
        with profiler:
            for _ in range(after):
                profiler.step()
            raise ZeroDivisionError

    for after in (0, 1, 2, 9):
        with pytest.raises(ZeroDivisionError):
            fail(Profiler("cpu", steps=20, warmup=7), after)
        assert not torch._C._autograd._profiler_enabled()
        assert torch._C._len_torch_dispatch_stack() == 0


def trace_of_replays(steps: int = 10) -> dict:
    """As PyTorch 2.11 writes one of a host that replays a graph of two kernels, each step, and runs far ahead."""

    def row(name: str, category: str, start: float, duration: float, thread: int, **details: int) -> dict:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread, "args": details}

    rows = [row("hotloop.step", "user_annotation", 0, 0, 1)]
    for step in range(steps):
        rows.append(row("cudaGraphLaunch", "cuda_runtime", 10 * step + 1, 8, 1, correlation=step + 1))
        rows.append(row("void sgemm<4>(float)", "kernel", 1000 * step + 50, 300, 7, correlation=step + 1, graph=3))
        rows.append(row("void relu<4>(float)", "kernel", 1000 * step + 850, 199, 7, correlation=step + 1))
        rows.append(row("hotloop.step", "user_annotation", 10 * step + 10, 0, 1))
    return {"traceEvents": rows}


def test_a_gpu_that_replays_graphs_is_not_called_idle() -> None:
    known = {"name": "train.py", "device": "cuda:0", "device_name": "a GPU", "date": "2026-01-01T00:00:00+00:00"}
    known |= {"versions": {}, "skipped": 0, "plain": None, "memory": (), "peak_memory": None, "ceilings": {}}
    profile = analyse(events_in(trace_of_replays()), **known)
    assert profile.parts.shares["compute"] > 0.99, profile
    assert profile.replay_share > 0.99
    assert {(each.name, each.phase) for each in profile.operations} == {("sgemm", "CUDA graph"), ("relu", "CUDA graph")}
    assert sum(each.share for each in profile.operations) == pytest.approx(0.5, abs=0.01), "of all steps"
    assert not any("nothing to do" in each.what for each in profile.advice)
    assert "in CUDA graphs" in str(profile)
    page, terminal = profile_page(profile), Console(width=200, file=io.StringIO())
    terminal.print(profile_summary(profile))
    for shown in (page, terminal.file.getvalue()):
        assert "replayed CUDA graphs for 99% of the time" in shown
        assert "sgemm, CUDA graph" in shown
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert profile.to_json()["replayed"] == pytest.approx(profile.parts.compute)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 2048], ids=["short kernels", "long kernels"])
@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "by a plan"])
def test_a_gpu_that_replays_a_captured_step_is_not_called_idle(width: int, by_hand: bool) -> None:
    model = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(width, width), nn.ReLU()))).cuda()
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    batch = torch.randn(512, width, device="cuda")

    def objective(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    def step() -> None:
        optimizer.zero_grad()
        objective(model, batch).backward()
        optimizer.step()

    if by_hand:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        replay = graph.replay
    else:
        loop = hotloop.Loop(model, optimizer, objective=objective, plan=hotloop.Plan("cuda", graph=1))
        for _ in range(20):
            loop.step(batch)
        replay = partial(loop.step, batch)
    with Profiler("cuda", steps=10, warmup=8) as profiler:
        while not profiler.done:
            replay()
            profiler.step()
    profile = profiler.profile
    assert profile.replayed > 0
    if width > 64 or by_hand:  # the host hands over a replay of short kernels in less time than it takes
        assert profile.parts.shares["compute"] > 0.9, profile
        assert profile.replay_share > 0.9
        assert not any("nothing to do" in each.what for each in profile.advice)
    assert sum(each.share for each in profile.operations) > 0.3, profile
    assert profile.operations[0].phase == "CUDA graph"
    assert profile.to_json()["replayed"] == profile.replayed


@pytest.mark.gpu
def test_a_gpu_tells_compute_gaps_copies_and_waits() -> None:
    profiler = Profiler("cuda", steps=8, warmup=8)
    train(profiler, tensors(2048), "cuda", batch=64)
    profile = profiler.profile
    assert profile.device.startswith("cuda")
    assert profile.parts.compute > 0
    assert profile.parts.gaps > 0  # a tiny network is bound by its host
    assert profile.peak_memory > 0
    reads = [wait for wait in profile.waits if ".item()" in wait.what]
    assert reads[0].line.code == "loss.item()  # read"
    assert reads[0].calls == pytest.approx(1)
    assert reads[0].seconds > 0
    assert any(".to(device)" in (wait.line.code if wait.line else "") for wait in profile.waits)  # not pinned


@pytest.mark.gpu
def test_a_gpu_that_computes_all_the_time_is_told_so_and_its_lines_are_known() -> None:
    weights = torch.randn(4096, 4096, device="cuda", requires_grad=True)
    inputs = torch.randn(4096, 4096, device="cuda")
    optimizer = torch.optim.SGD([weights], lr=1e-6)
    with Profiler(steps=5, warmup=8) as profiler:
        while not profiler.done:
            optimizer.zero_grad()
            (inputs @ weights).sum().backward()  # product
            optimizer.step()
            profiler.step()
    profile = profiler.profile
    assert profile.parts.shares["compute"] > 0.8
    assert profile.parts.total == pytest.approx(sum(profile.seconds), rel=0.02)
    product = profile.operations[0]
    assert product.name == "mm"
    assert product.line.code.endswith("# product")
    backward = [o for o in profile.operations if o.name == "mm" and o.phase == "backward"]
    assert backward[0].line == next(o for o in profile.operations if o.phase == "forward" and o.name == "mm").line
    assert sum(profile.flops.values()) == 2 * 2 * 4096**3
    begin = time.perf_counter()
    for _ in range(5):
        optimizer.zero_grad()
        (inputs @ weights).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    plain = (time.perf_counter() - begin) / 5
    assert profile.median == pytest.approx(plain, rel=0.3)  # the step of the device, not of the host that runs ahead
