"""The allocator's model: what PyTorch does, by hand; what always holds, by chance; and a recorded trace, replayed."""

import runpy
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from allocation_traces import Trace, TraceEntry, read_trace, replay, write_trace
from hotloop.apps.simulate.allocator import FIRST_RANGE, Allocator, Block, Full, Pool, rounded, segment_for
from hotloop.errors import BadArgument

KIB, MIB, GIB = 2**10, 2**20, 2**30
TRACES = sorted((Path(__file__).parent / "traces").glob("*.json.gz"))
sizes = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 3 * MIB),
    st.integers(1, 64).map(lambda n: n * 512 * KIB),
    st.integers(MIB - 600, MIB + 600),
    st.integers(10 * MIB - 600, 10 * MIB + 600),
)


def test_the_bounds_themselves() -> None:
    allocator = Allocator(GIB)
    allocator.allocate(MIB)  # is small still
    assert allocator.reserved == 2 * MIB
    assert allocator.allocate(MIB - 512).size == MIB - 512  # and 512 bytes are worth splitting off
    allocator.allocate(512)
    assert (allocator.allocated, allocator.reserved) == (2 * MIB, 2 * MIB)
    allocator.allocate(10 * MIB)  # has a segment of its own
    assert allocator.reserved == 12 * MIB


def reserved_by_rule(trace: Trace) -> int:
    """The peak, with addresses by rule; from its own the trace tells only when the first kernel had run."""
    segments = [event for event in trace.events if event.action == "segment_alloc"]
    top = next(event.address for event in segments if event.size == 2 * MIB)
    late = next(event for event in segments if top - FIRST_RANGE <= event.address < top and event.size > 2 * MIB)
    allocator, live = Allocator(2**50), {}
    for event in trace.events:
        if event is late:
            allocator.addresses.kernels_loaded()
        if event.action == "alloc":
            live[event.address] = allocator.allocate(event.size)
        elif event.action == "free_completed" and event.address in live:
            allocator.free(live.pop(event.address))
    return allocator.all.reserved.most


def test_addresses_by_rule_give_what_was_reserved() -> None:
    """In all that was recorded but one, whose blocks of 128 MiB would be found by one rule and not by another."""
    traces = [trace for trace in map(read_trace, TRACES) if trace.cap is None]
    exact = [trace.name for trace in traces if reserved_by_rule(trace) == trace.peak[1]]
    assert len(traces) - len(exact) <= 1, exact


def test_what_is_freed_joins_its_neighbours() -> None:
    allocator = Allocator(GIB)
    first, second, third = (allocator.allocate(6 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.free(third)
    assert allocator.all.inactive.bytes == 14 * MIB
    allocator.free(second)
    assert allocator.all.inactive.bytes == 0
    assert allocator.allocate(19 * MIB + 1).address == first.address
    assert allocator.reserved == 20 * MIB


def test_what_is_split_cannot_be_released() -> None:
    allocator = Allocator(100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(50 * MIB)  # a part of the cached 60 MiB, whose rest stays
    allocator.allocate(30 * MIB)
    assert (allocator.reserved, allocator.retries) == (90 * MIB, 0)
    with pytest.raises(Full) as full:
        allocator.allocate(19 * MIB)
    assert (full.value.asked, full.value.segment) == (19 * MIB, 20 * MIB)
    assert (allocator.retries, allocator.failures, allocator.reserved) == (1, 1, 90 * MIB)
    allocator.allocate(10 * MIB)
    assert (allocator.retries, allocator.reserved, allocator.allocated) == (1, 90 * MIB, 90 * MIB)


def test_a_release_makes_room() -> None:
    allocator = Allocator(100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.reserved, allocator.retries, allocator.failures) == (80 * MIB, 1, 0)


def test_a_cap_holds_like_too_little_memory() -> None:
    allocator = Allocator(GIB, cap=50 * MIB)
    allocator.allocate(40 * MIB)
    with pytest.raises(Full):
        allocator.allocate(12 * MIB)
    allocator.cap = None
    allocator.allocate(12 * MIB)


def test_statistics_have_pytorchs_names() -> None:
    allocator = Allocator(GIB)
    small, large = allocator.allocate(100), allocator.allocate(12 * MIB)
    allocator.free(large)
    stats = allocator.stats()
    assert stats["allocated_bytes.all.current"] == stats["active_bytes.all.current"] == small.size
    assert stats["allocated_bytes.all.peak"] == 12 * MIB + 512
    assert stats["allocated_bytes.all.freed"] == 12 * MIB
    assert stats["requested_bytes.all.current"] == 100
    assert stats["reserved_bytes.all.current"] == 14 * MIB
    assert stats["inactive_split_bytes.all.current"] == 2 * MIB - 512
    assert (stats["segment.all.current"], stats["allocation.all.allocated"]) == (2, 2)
    allocator.reset_peaks()
    allocator.reset_ever()
    assert allocator.stats()["allocated_bytes.all.peak"] == 512
    assert allocator.stats()["allocated_bytes.all.freed"] == 0


class Holds(RuleBasedStateMachine):
    """Whatever is asked of it in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(256 * MIB)
        self.live: list[Block] = []

    @property
    def pools(self) -> tuple[Pool, Pool]:
        return self.allocator.small, self.allocator.large

    @rule(size=sizes)
    def allocate(self, size: int) -> None:
        fitting = sorted(b for b in self.pools[rounded(size) > MIB].free if b[0] >= rounded(size))
        before = self.allocator.reserved
        try:
            block = self.allocator.allocate(size)
        except Full:
            block = None
        if block is None:
            assert self.allocator.reserved + segment_for(rounded(size)) > 256 * MIB
            return
        self.live.append(block)
        assert block.size >= size
        assert block.size - rounded(size) <= (0 if block.size <= MIB else MIB)
        if fitting:
            assert (self.allocator.reserved, block.address) == (before, fitting[0][1])

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.live:
            self.allocator.free(self.live.pop(data.draw(st.integers(0, len(self.live) - 1))))

    @rule()
    def empty(self) -> None:
        self.allocator.empty_cache()
        assert all(block.split for pool in self.pools for block in pool.blocks.values())

    @invariant()
    def nothing_overlaps_and_all_adds_up(self) -> None:
        allocator = self.allocator
        free = [block for pool in self.pools for block in pool.blocks.values()]
        spans = sorted((block.address, block.address + block.size) for block in [*self.live, *free])
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert allocator.allocated == sum(block.size for block in self.live)
        assert allocator.reserved == allocator.allocated + sum(block.size for block in free) <= allocator.room
        assert allocator.all.requested.bytes == sum(block.requested for block in self.live)
        for pool in self.pools:
            assert pool.free == sorted((block.size, block.address) for block in pool.blocks.values())
            assert not any(b.after and not b.after.in_use for b in pool.blocks.values())
        assert allocator.all.inactive.bytes == sum(block.size for block in free if block.split)

    def teardown(self) -> None:
        for block in self.live:
            self.allocator.free(block)
        self.allocator.empty_cache()
        assert (self.allocator.allocated, self.allocator.reserved) == (0, 0)


TestHolds = Holds.TestCase
TestHolds.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


@given(sizes)
def test_a_segment_holds_its_request(size: int) -> None:
    assert segment_for(rounded(size)) >= rounded(size) >= size
    assert segment_for(rounded(size)) % (2 * MIB) == 0


def test_a_trace_is_written_and_read_and_the_first_difference_is_named(tmp_path: Path) -> None:
    trace = read_trace(TRACES[0])
    write_trace(tmp_path / "one.json.gz", trace)
    assert read_trace(tmp_path / "one.json.gz") == trace
    events = list(trace.events)
    place = next(i for i, event in enumerate(events) if i > 100 and event.action == "segment_alloc")
    events[place] = events[place]._replace(size=events[place].size + 2 * MIB)
    found = replay(replace(trace, events=tuple(events)))
    assert not found.exact
    assert found.first is not None
    assert found.first.event >= place
    assert "instead of" in str(found.first)


def test_a_cache_that_was_emptied_by_hand_is_noticed() -> None:
    events = (
        TraceEntry("segment_alloc", 0, 12 * MIB),
        TraceEntry("alloc", 0, 12 * MIB),
        TraceEntry("free_requested", 0, 12 * MIB),
        TraceEntry("free_completed", 0, 12 * MIB),
        TraceEntry("segment_free", 0, 12 * MIB),
        TraceEntry("segment_alloc", 0, 2 * MIB),
        TraceEntry("alloc", 0, 100),
    )
    found = replay(Trace("emptied", GIB, None, (12 * MIB, 12 * MIB), events))
    assert found.exact, str(found.first)
    assert found.figures[-1] == (512, 2 * MIB)


@pytest.mark.parametrize("content", [b"", b"no gzip", b"\x1f\x8b\x08\x00"])
def test_a_file_without_a_trace_is_an_error_with_a_fix(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(BadArgument, match="no recorded allocations") as refused:
        read_trace(tmp_path / "bad")
    assert refused.value.fix


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_what_was_recorded_on_an_h200_is_followed_to_the_byte(path: Path) -> None:
    found = replay(read_trace(path))
    assert found.exact, f"{path.name}: {found.first}"
    assert len(found.figures) > 1000


def test_at_least_six_trainings_were_recorded_and_one_of_them_ran_out() -> None:
    assert len(TRACES) >= 6
    actions = [{event.action for event in read_trace(path).events} for path in TRACES]
    assert any({"oom", "segment_free"} <= each for each in actions)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to record on")
def test_without_a_gpu_a_recording_is_refused_with_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = Path(__file__).resolve().parents[2] / "benchmarks" / "record_allocations.py"
    monkeypatch.syspath_prepend(benchmark.parent)
    monkeypatch.setattr(sys, "argv", [str(benchmark), "--quick", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(benchmark), run_name="__main__")
    assert ended.value.code == 3
    error = capsys.readouterr().err
    assert "no CUDA GPU" in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_a_recording_on_a_gpu_is_followed_to_the_byte(tmp_path: Path) -> None:
    benchmark = Path(__file__).resolve().parents[2] / "benchmarks" / "record_allocations.py"
    command = [sys.executable, str(benchmark), "--one", "cnn", "--steps", "3", "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    found = replay(read_trace(tmp_path / "cnn.json.gz"))
    assert found.exact, str(found.first)
    assert len(found.figures) > 100
