"""Collectives on links: the formulas, and the line through measured ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.simulate.scaling import (
    Cluster,
    Interconnect,
    MeasuredCluster,
    cluster,
    fitted,
    interconnect,
    interconnects,
)
from hotloop.apps.simulate.scaling.links import TABLE
from hotloop.errors import BadArgument

FAST, SLOW = Interconnect("fast", "fast", 100e9, 1e-6), Interconnect("slow", "slow", 10e9, 5e-6)


def test_a_ring_in_one_node_is_as_the_textbook_has_it() -> None:
    alone = Cluster(FAST)
    assert alone.all_reduce(8, 1e9) == pytest.approx(2 * 7 / 8 * 1e9 / 100e9 + 2 * 7 * 1e-6)
    assert alone.all_gather(8, 1e9) == pytest.approx(7 / 8 * 1e9 / 100e9 + 7 * 1e-6)


def test_one_gpu_has_nobody_to_talk_to() -> None:
    assert Cluster(FAST, SLOW).all_reduce(1, 1e9) == Cluster(FAST, SLOW).all_gather(1, 1e9) == 0


def test_between_nodes_the_slowest_link_counts_and_each_gpu_may_have_its_own() -> None:
    own = Cluster(FAST, SLOW)
    shared = Cluster(FAST, Interconnect("slow", "slow", 10e9, 5e-6, shared=True))
    hops = 14 * 1e-6 + 2 * 5e-6
    assert own.all_gather(16, 1e9) == pytest.approx(15 / 16 * (1e9 / 80e9 + hops))
    assert shared.all_gather(16, 1e9) == pytest.approx(15 / 16 * (1e9 / 10e9 + hops))


def test_a_small_all_reduce_of_many_nodes_goes_over_a_tree() -> None:
    joined = Cluster(FAST, SLOW)
    hops = 2 * (7 * 1e-6 + 7 * 5e-6)  # eight GPUs in a chain, 128 nodes in a tree
    assert joined.all_reduce(1024, 1000) == pytest.approx(2 * 1000 / 80e9 + hops)
    assert joined.all_reduce(1024, 1000) < 2 * joined.all_gather(1024, 1000)


@given(st.integers(2, 1024), st.floats(1, 1e10), st.sampled_from(interconnects()), st.floats(1, 10))
def test_more_bandwidth_never_takes_longer(gpus: int, size: float, link: Interconnect, faster: float) -> None:
    quick = Interconnect(link.key, link.name, link.bandwidth * faster, link.latency, link.shared)
    for before, after in ((Cluster(link, SLOW), Cluster(quick, SLOW)), (Cluster(FAST, link), Cluster(FAST, quick))):
        assert after.all_reduce(gpus, size) <= before.all_reduce(gpus, size)
        assert after.all_gather(gpus, size) <= before.all_gather(gpus, size)


@given(st.integers(2, 64), st.floats(1e-6, 1e-2), st.floats(1e7, 1e12))
def test_the_line_through_a_line_is_itself_and_its_link_gives_it_back(gpus: int, latency: float, rate: float) -> None:
    sizes = [4**power * 1024 for power in range(1, 9)]
    seconds = [latency + size / rate for size in sizes]
    line = fitted(gpus, sizes, seconds)
    assert line.error < 1e-6
    for size, each in zip(sizes, seconds, strict=True):
        ring = 2 * Cluster(line.link).all_gather(gpus, size)
        assert ring == pytest.approx(each, rel=1e-5)


@pytest.mark.parametrize("seconds", [[1e-3, 1.5e-3, 9e-4], [1e-6, 1e-3, 1.5]])
def test_a_line_never_has_a_negative_part(seconds: list[float]) -> None:
    line = fitted(2, [1_000, 1_000_000, 1_000_000_000], seconds)
    assert line.latency >= 0
    assert line.rate > 0
    assert line.link.is_sound()


def test_ranks_that_were_measured_take_what_was_measured_and_others_what_the_line_says() -> None:
    line = fitted(2, [1_000, 1_000_000, 20_000_000], [1e-3, 2e-3, 40e-3])
    here = MeasuredCluster.of(line)
    assert here.all_reduce(2, 20_000_000) == 40e-3
    assert here.all_reduce(2, 10_500_000) == pytest.approx(21e-3), "halfway between two sizes"
    assert here.all_reduce(2, 40_000_000) == pytest.approx(line.latency + 40_000_000 / line.rate)
    assert here.all_reduce(4, 1e6) == Cluster(line.link, None, 2).all_reduce(4, 1e6)


def test_a_line_needs_two_sizes() -> None:
    with pytest.raises(BadArgument, match="two sizes"):
        fitted(2, [1_000], [1e-3])


def test_every_named_link_says_where_its_figures_are_from() -> None:
    for link in interconnects():
        assert link.is_sound()
        assert len(link.source) > 20, link.key
        assert link.bandwidth > 1e8
    assert TABLE.name == "links.json"


def test_links_are_found_by_name_alone_or_in_pairs() -> None:
    assert interconnect("NVLink-4").key == "nvlink4"
    pair = cluster("nvlink4, ethernet100")
    assert pair.between is not None
    assert (pair.inside.key, pair.between.key, pair.node) == ("nvlink4", "ethernet100", 8)
    assert cluster("hdr200").node == 1


@pytest.mark.parametrize("names", ["nvlink99", "ndr400,nvlink4", "nvlink4,nvlink3", ""])
def test_links_that_cannot_be_meant_are_refused(names: str) -> None:
    with pytest.raises(BadArgument) as refused:
        cluster(names)
    assert refused.value.fix is not None
