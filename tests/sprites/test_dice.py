"""Dice: pure functions of seed, number and name, in range, even, and independent of who else is thrown."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.sprites.canvas import unpack
from hotloop.apps.sprites.dice import Dice, mix, mix_word, signed

SEEDS = st.integers(0, 2**63 - 1)
NAMES = st.text(max_size=12)


@given(st.integers(-(2**63), 2**63 - 1))
def test_the_tensor_hash_is_splitmix64(word):
    assert int(mix(torch.tensor([word]))[0]) == signed(mix_word(word))


def test_splitmix64_reference_values():
    # the first outputs of splitmix64 seeded with 0 are the finaliser of multiples of the golden ratio
    assert mix_word(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert mix_word(2 * 0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


@given(SEEDS, NAMES, st.integers(1, 2**31))
def test_below_stays_in_range(seed, name, limit):
    drawn = Dice(seed, torch.arange(64)).below(name, limit)
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < limit


@given(SEEDS, st.integers(-50, 50), st.integers(0, 40))
def test_between_includes_both_ends(seed, low, more):
    drawn = Dice(seed, torch.arange(2000)).between("size", low, low + more)
    assert (int(drawn.min()), int(drawn.max())) == (low, low + more)


@given(SEEDS, NAMES, st.permutations(range(20)))
def test_a_draw_does_not_depend_on_the_others(seed, name, order):
    numbers = torch.tensor(order)
    together = Dice(seed, torch.arange(20)).below(name, 1000)
    assert torch.equal(Dice(seed, numbers).below(name, 1000), together[numbers])
    assert torch.equal(Dice(seed, numbers[:3]).below(name, 1000), together[numbers[:3]])


@given(SEEDS, NAMES)
def test_draws_are_even(seed, name):
    counts = torch.bincount(Dice(seed, torch.arange(8000)).below(name, 16), minlength=16)
    chi_square = float(((counts - 500) ** 2 / 500).sum())
    assert chi_square < 70  # 15 degrees of freedom: once in some ten million


def test_names_seeds_and_topics_give_different_draws():
    dice = Dice(3, torch.arange(1000))
    others = (dice.below("b", 1000), Dice(4, torch.arange(1000)).below("a", 1000), dice.about("x").below("a", 1000))
    for other in others:
        assert (dice.below("a", 1000) == other).sum() < 15


def test_chance_and_choose():
    dice = Dice(5, torch.arange(9000))
    assert 2700 < int(dice.chance("third", 1, 3).sum()) < 3300
    assert not dice.chance("never", 0, 5).any()
    assert dice.chance("always", 5, 5).all()
    rows = dice.choose("row", [(1, 2), (3, 4)])
    assert {tuple(row) for row in rows.tolist()} == {(1, 2), (3, 4)}


def test_speckle_sets_its_part_of_the_pixels():
    dice = Dice(6, torch.arange(500))
    for part in (1, 8, 16, 19, 31):
        pixels = unpack(dice.speckle("spots", part))
        assert pixels.shape == (500, 16, 16)
        assert abs(float(pixels.float().mean()) - part / 32) < 0.01
    assert torch.equal(Dice(6, torch.tensor([7])).speckle("spots", 8)[0], dice.speckle("spots", 8)[7])
