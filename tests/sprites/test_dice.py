"""Dice: pure functions of seed, number and name, in range, even, and independent of who else is thrown."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hotloop.apps.sprites.dice import Dice, mix, mix_word, signed

SEEDS = st.integers(0, 2**63 - 1)
NAMES = st.text(max_size=12)


@given(st.integers(-(2**63), 2**63 - 1))
def test_the_tensor_hash_is_splitmix64(word):
    assert int(mix(torch.tensor([word]))[0]) == signed(mix_word(word))
    # the first outputs of splitmix64 seeded with 0 are the finaliser of multiples of the golden ratio
    assert mix_word(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert mix_word(2 * 0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


@given(SEEDS, NAMES, st.permutations(range(20)))
def test_a_draw_does_not_depend_on_the_others(seed, name, order):
    numbers = torch.tensor(order)
    together = Dice(seed, torch.arange(20)).below(name, 1000)
    assert torch.equal(Dice(seed, numbers[:3]).below(name, 1000), together[numbers[:3]])


@given(SEEDS, NAMES, st.integers(1, 2**31))
def test_draws_are_even_and_in_range(seed, name, limit):
    dice = Dice(seed, torch.arange(8000))
    drawn = dice.below(name, limit)
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < limit
    counts = torch.bincount(dice.between(name, 3, 18), minlength=19)
    chi_square = float(((counts[3:] - 500) ** 2 / 500).sum())
    assert chi_square < 70  # 15 degrees of freedom: once in some ten million


def test_names_seeds_and_topics_give_different_draws():
    numbers = torch.arange(1000)
    words = {
        tuple(Dice(seed, numbers, topic).words(name).tolist())
        for seed, topic, name in ((3, "", "a"), (3, "", "b"), (4, "", "a"), (3, "x", "a"))
    }
    assert len(words) == 4


def test_chance_choose_and_speckle():
    dice = Dice(5, torch.arange(9000))
    assert 2700 < int(dice.chance("third", 1, 3).sum()) < 3300
    assert not dice.chance("never", 0, 5).any()
    rows = dice.choose("row", [(1, 2), (3, 4)])
    assert {tuple(row) for row in rows.tolist()} == {(1, 2), (3, 4)}
    for part in (1, 19, 31):
        pixels = Dice(6, torch.arange(500)).speckle("spots", part)
        assert abs(float(pixels.float().mean()) - part / 32) < 0.01
        assert torch.equal(Dice(6, torch.tensor([7])).speckle("spots", part)[0], pixels[7])
