"""The step of several GPUs: what must hold whatever is trained, and schedules that can be computed by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.simulate.scaling import (
    PARALLEL,
    Cluster,
    GradientReady,
    Interconnect,
    RankStep,
    cluster,
    interconnects,
    rank_memory,
    scaled,
)
from hotloop.apps.simulate.scaling.model import MIB, buckets
from hotloop.errors import BadArgument

times = st.floats(1e-6, 10)
parallels = st.sampled_from(PARALLEL)
links = st.sampled_from([link.key for link in interconnects()])
numbers = st.integers(1, 1024)


@st.composite
def steps(draw: st.DrawFn) -> RankStep:
    ready = sorted(draw(st.lists(st.floats(0, 1), max_size=30)))
    gradients = (
        GradientReady(draw(st.integers(1, 10**9)), at, draw(st.sampled_from(["", "blocks.0", "blocks.1", "blocks.2"])))
        for at in ready
    )
    return RankStep(draw(times), draw(times), draw(times), tuple(gradients), units=draw(st.floats(1, 1e4)))


@given(steps(), links, numbers, parallels, st.floats(0, 1))
def test_throughput_never_grows_faster_than_the_gpus(
    step: RankStep, link: str, gpus: int, parallel: str, overlap: float
) -> None:
    found = scaled(step, cluster(link), gpus, parallel, overlap=overlap)
    assert found.is_sound()
    assert 0 < found.efficiency <= 1
    assert found.throughput <= gpus * step.units / step.seconds * (1 + 1e-12)
    assert found.throughput == pytest.approx(found.efficiency * gpus * step.units / step.seconds)
    assert 0 <= found.exposed <= found.communication * (1 + 1e-12)
    assert found.seconds == pytest.approx(step.seconds + found.exposed)


@given(steps(), links, parallels)
def test_one_gpu_is_the_step_alone(step: RankStep, link: str, parallel: str) -> None:
    found = scaled(step, cluster(link), 1, parallel)
    assert (found.communication, found.exposed, found.efficiency) == (0, 0, 1)
    assert found.seconds == step.seconds


@given(steps(), numbers, parallels, st.floats(1e6, 1e12), st.floats(1, 100), st.floats(0, 1))
def test_a_faster_link_is_never_slower(
    step: RankStep, gpus: int, parallel: str, bandwidth: float, faster: float, overlap: float
) -> None:
    def on(rate: float) -> float:
        link = Interconnect("a", "a", rate, 1e-5)
        return scaled(step, Cluster(link, link), gpus, parallel, overlap=overlap).seconds

    assert on(bandwidth * faster) <= on(bandwidth) * (1 + 1e-9)


@given(steps(), links, numbers, parallels)
def test_what_hides_nothing_is_the_slowest(step: RankStep, link: str, gpus: int, parallel: str) -> None:
    hidden, bare = (scaled(step, cluster(link), gpus, parallel, overlap=overlap) for overlap in (1.0, 0.0))
    assert hidden.seconds <= bare.seconds * (1 + 1e-9)
    assert bare.exposed == pytest.approx(bare.communication)


def test_ddp_hides_all_but_the_last_bucket() -> None:
    link = Interconnect("a", "a", 1e9, 0.0)  # between two GPUs, a byte takes a nanosecond
    halves = (GradientReady(30 * MIB, 0.5), GradientReady(30 * MIB, 1.0))
    step = RankStep(1.0, 1.0, 0.5, halves)
    found = scaled(step, Cluster(link), 2)
    assert found.communication == pytest.approx(60 * MIB / 1e9)
    assert found.exposed == pytest.approx(30 * MIB / 1e9)


def test_ddp_copies_gradients_into_buckets_and_back() -> None:
    step, copying = (RankStep(1.0, 1.0, 0.5, (GradientReady(MIB, 1.0),), copies=copies) for copies in (0.0, 0.25))
    network = cluster("nvlink4")
    assert scaled(copying, network, 2).seconds == scaled(step, network, 2).seconds + 0.25
    assert scaled(copying, network, 2, "fsdp") == scaled(step, network, 2, "fsdp")
    assert scaled(copying, network, 1).seconds == 2.5


def test_a_bucket_waits_for_the_one_before_it() -> None:
    link = Interconnect("a", "a", 1e6, 0.0)  # slow: all of it is queued behind the first
    step = RankStep(1.0, 1.0, 0.5, (GradientReady(30 * MIB, 0.5), GradientReady(30 * MIB, 1.0)))
    found = scaled(step, Cluster(link), 2)
    assert found.exposed == pytest.approx(found.communication - 0.5)


def test_buckets_are_those_of_ddp() -> None:
    gradients = [GradientReady(MIB // 2, n / 100) for n in range(1, 101)]
    found = list(buckets(gradients))
    assert [size // MIB for size, _ in found] == [1, 25, 24]
    assert [ready for _, ready in found] == [0.02, 0.52, 1.0]
    assert sum(size for size, _ in found) == 50 * MIB


def test_fsdp_gathers_the_next_block_while_one_computes() -> None:
    """Two blocks of a second's forward, two of backward, each gathered in half a second."""
    link = Interconnect("a", "a", 1e6, 0.0)
    block = 1_000_000  # of two GPUs half has to come: half a second
    gradients = (GradientReady(block, 0.5, "blocks.1"), GradientReady(block, 1.0, "blocks.0"))
    step = RankStep(2.0, 4.0, 1.0, gradients)
    found = scaled(step, Cluster(link), 2, "fsdp")
    assert found.communication == pytest.approx(6 * 0.5)
    # Not hidden: the first gather, that of the first block of backward, and the last reduce-scatter.
    assert found.exposed == pytest.approx(3 * 0.5)


def test_fsdp_keeps_the_root() -> None:
    link = Interconnect("a", "a", 1e6, 0.0)
    step = RankStep(2.0, 4.0, 1.0, (GradientReady(1_000_000, 1.0),))
    found = scaled(step, Cluster(link), 2, "fsdp")
    assert found.communication == found.exposed == pytest.approx(2 * 0.5)


def test_what_cannot_be_meant_is_refused() -> None:
    step = RankStep(1.0, 1.0, 1.0, ())
    with pytest.raises(BadArgument, match="0 GPUs"):
        scaled(step, cluster("nvlink4"), 0)
    with pytest.raises(BadArgument, match="tensor"):
        scaled(step, cluster("nvlink4"), 2, "tensor")
    with pytest.raises(BadArgument, match="tensor"):
        rank_memory("tensor", 2, parameters=1, gradients=1, optimizer=1, other=1)


amounts = st.integers(10**6, 10**12)  # bytes


@given(amounts, amounts, amounts, amounts, st.integers(0, 10**12), st.integers(1, 512))
def test_memory_of_a_rank_falls_with_the_gpus_for_fsdp(
    parameters: int, gradients: int, optimizer: int, other: int, largest: int, gpus: int
) -> None:
    given_ = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer, "other": other}
    fewer, more = (rank_memory("fsdp", n, largest=largest, **given_) for n in (gpus, 2 * gpus))
    assert more.total < fewer.total
    assert more.total >= other
    assert rank_memory("ddp", gpus, **given_).total >= other + parameters + gradients + optimizer


def test_ddp_keeps_all_and_its_buckets() -> None:
    found = rank_memory("ddp", 8, parameters=4, gradients=0, optimizer=8, other=1, trained=4)
    assert (found.parameters, found.gradients, found.optimizer, found.whole, found.other) == (4, 0, 8, 4, 1)
    assert rank_memory("ddp", 1, parameters=4, gradients=4, optimizer=8, other=1).whole == 0


def test_fsdp_has_the_gradients_of_the_root_and_of_a_block_whole_before_they_are_scattered() -> None:
    sizes = {"parameters": 40.0, "optimizer": 80.0, "other": 1.0, "root": 4.0, "largest": 6.0}
    backward, forward = (rank_memory("fsdp", 4, gradients=there, **sizes) for there in (40.0, 0.0))
    assert (backward.whole, backward.unsharded, backward.gradients) == (16.0, 16.0, 10.0)
    assert forward.unsharded == 0.0, "in the forward pass there are none"
    assert backward.total - forward.total == 26.0
