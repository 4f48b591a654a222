"""Budgets in words, and the choice of blocks: the least time that saves enough, held to trying every choice."""

import math
import random
import time
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.errors import BadArgument
from hotloop.memory.budget import CheckpointCandidate, bytes_of, choose, most, saving

from ..thorough import tries


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (1024, 1024),
        ("1024", 1024),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5KiB", 1536),
        ("2TB", 2 * 10**12),
        ("12b", 12),
        ("80%", 800),
        (" 2.5 % ", 25),
    ],
)
def test_budgets(budget: int | str, expected: int) -> None:
    assert bytes_of(budget, total=1000) == expected


@pytest.mark.parametrize(
    "budget", ["", "much", "8G", "8iB", "-1GiB", "0", 0, -5, "0%", "101%", True, 1.5, None, "1e9", "8GiB of it"]
)
def test_what_is_no_budget_is_refused_with_a_fix(budget: object) -> None:
    with pytest.raises(BadArgument, match="memory_budget=") as refused:
        bytes_of(budget, total=1000)  # type: ignore[arg-type]
    assert refused.value.fix


def test_a_share_needs_a_device_that_tells_its_memory() -> None:
    with pytest.raises(BadArgument, match="does not tell"):
        bytes_of("80%")


def nested(name: str) -> st.SearchStrategy[list[CheckpointCandidate]]:
    """A block, and up to two parts of it."""
    sizes, times = st.integers(0, 60), st.integers(0, 40).map(float)
    part = st.tuples(sizes, times)
    return st.tuples(part, st.lists(part, max_size=2)).map(
        lambda drawn: [
            CheckpointCandidate(name, *drawn[0]),
            *(CheckpointCandidate(f"{name}.{i}", *inner) for i, inner in enumerate(drawn[1])),
        ]
    )


models = (
    st.integers(0, 3)
    .flatmap(lambda n: st.tuples(*(nested(f"blocks.{i}") for i in range(n))))
    .map(lambda trees: [block for tree in trees for block in tree])
)


def allowed(blocks: list[CheckpointCandidate]) -> list[tuple[CheckpointCandidate, ...]]:
    """Every choice in which no block contains another."""
    every = (some for n in range(len(blocks) + 1) for some in combinations(blocks, n))
    return [
        some for some in every if not any(a.name.startswith(f"{b.name}.") for a in some for b in some if a is not b)
    ]


@settings(max_examples=tries(50, 300), deadline=None)
@given(models, st.integers(-5, 200), st.integers(0, 80))
def test_nothing_that_saves_enough_takes_less_time(
    blocks: list[CheckpointCandidate], needed: int, headroom: int
) -> None:
    good = [some for some in allowed(blocks) if saving(some, headroom) >= needed]
    chosen = choose(blocks, needed, headroom)
    if not good:
        assert chosen is None
        return
    assert chosen is not None
    named = tuple(block for block in blocks if block.name in chosen)
    assert named in allowed(blocks)
    if needed > 0:
        assert saving(named, headroom) >= needed
    assert sum(b.seconds for b in named) == min(sum(b.seconds for b in some) for some in good)


@settings(max_examples=tries(40, 200), deadline=None)
@given(models, st.integers(0, 80))
def test_most_saves_most(blocks: list[CheckpointCandidate], headroom: int) -> None:
    names = most(blocks, headroom)
    chosen = tuple(block for block in blocks if block.name in names)
    assert chosen in allowed(blocks)
    assert saving(chosen, headroom) == max(0, *(saving(some, headroom) for some in allowed(blocks)))


def test_the_largest_block_comes_back_unless_the_peak_is_elsewhere() -> None:
    blocks = [CheckpointCandidate("a", 100, 1.0), CheckpointCandidate("b", 100, 1.0)]
    assert choose(blocks, 100) == ("a", "b")
    assert choose(blocks, 100, headroom=100) == ("a",)
    assert choose(blocks, 101) is None


def test_parts_are_chosen_where_a_whole_block_is_more_than_is_needed() -> None:
    blocks = [
        CheckpointCandidate("0", 100, 2.5),
        CheckpointCandidate("0.mlp", 60, 1.0),
        CheckpointCandidate("0.attention", 40, 2.0),
    ]
    assert choose(blocks, 50, headroom=1000) == ("0.mlp",)
    assert choose(blocks, 61, headroom=1000) == ("0",)


def test_names_that_begin_alike_are_not_inside_one_another() -> None:
    assert (
        choose([CheckpointCandidate("blocks.1", 10, 1.0), CheckpointCandidate("blocks.10", 10, 1.0)], 20, headroom=100)
        is not None
    )


def test_a_very_deep_model_is_no_trouble() -> None:
    blocks = [CheckpointCandidate(f"blocks.{i}", 100 + i % 3, 1.0) for i in range(400)]
    begin = time.perf_counter()
    chosen = choose(blocks, 20_000)
    assert time.perf_counter() - begin < 10
    assert chosen is not None
    assert saving([block for block in blocks if block.name in chosen]) >= 20_000
    assert len(chosen) == 133 + math.ceil((20_000 + 102 - 133 * 102) / 101)  # all of the largest, then the next


def test_blocks_that_are_all_different_are_chosen_well_and_soon() -> None:
    dice = random.Random(0)  # noqa: S311
    sizes = [dice.randrange(10**6, 10**9) for _ in range(tries(50, 150))]
    blocks = [
        CheckpointCandidate(f"{i}", saved, saved * dice.uniform(0.9, 1.1) * 1e-9) for i, saved in enumerate(sizes)
    ]
    needed = sum(sizes) // 2
    begin = time.perf_counter()
    chosen = choose(blocks, needed, headroom=2 * 10**9)
    assert time.perf_counter() - begin < 20
    assert chosen is not None
    assert sum(block.saved for block in blocks if block.name in chosen) >= needed
    least, saved = 0.0, 0  # by the share of one block that would just do: no choice takes less
    for block in sorted(blocks, key=lambda block: block.seconds / block.saved):
        part = min(1.0, (needed - saved) / block.saved)
        least, saved = least + part * block.seconds, saved + int(part * block.saved)
    assert sum(block.seconds for block in blocks if block.name in chosen) < 1.01 * least
