"""`make`: the same sprites for the same seed, whatever else is made, wherever it is made."""

import hashlib
import time

import pytest
import torch

from hotloop.apps.sprites import making
from hotloop.apps.sprites.making import CLASSES, draw, make
from hotloop.errors import BadArgument

from ..thorough import tries

# A change of any pixel shows here: look at the sprites before and after, then write down the new sums.
GOLDEN = {
    0: "fbb519ab6cb0f4ed6641ef717cde4fb6e9a6e626755ab0e6407f56f18d46a916",
    7: "21571367401955e3b586cc2693359afa2c3e4dcfc46a995ec371a937da0aefdf",
    2**63 - 1: "dea40b47aa8910b7b5a26e912c31d8e3418b2ead11cd5eeadb6e6c9a269fe774",
}


@pytest.mark.parametrize("seed", GOLDEN)
def test_the_bytes_are_those_of_every_other_machine(seed):
    sprites = make(64, seed=seed)
    assert (sprites.classes, sprites.source) == (CLASSES, f"made by hotloop, seed {seed}")
    data = sprites.pixels.numpy().tobytes() + sprites.labels.numpy().tobytes()
    assert hashlib.sha256(data).hexdigest() == GOLDEN[seed]


def test_a_sprite_depends_only_on_seed_number_and_class(monkeypatch):
    sprites = make(300, seed=9)
    monkeypatch.setattr(making, "CHUNK", 37)
    few = make(100, seed=9)
    assert torch.equal(few.pixels, sprites.pixels[:100])
    assert torch.equal(few.labels, sprites.labels[:100])
    for name in CLASSES:
        numbers = (sprites.labels == CLASSES.index(name)).nonzero()[:, 0]
        assert torch.equal(sprites.pixels[numbers], draw(name, numbers, seed=9))
        backwards = numbers.flip(0)
        assert torch.equal(sprites.pixels[backwards], draw(name, backwards, seed=9))


def test_every_class_comes_equally_often_and_mixed_or_some_alone():
    rounds = make(160, seed=3).labels.view(10, len(CLASSES))
    assert len({tuple(order) for order in rounds.tolist()}) == 10
    assert {tuple(sorted(order)) for order in rounds.tolist()} == {tuple(range(len(CLASSES)))}
    sprites = make(60, seed=3, classes=["gem", "sword", "gem"])
    assert (sprites.classes, len(sprites.of("sword"))) == (("gem", "sword"), 30)


def test_fewer_than_one_in_a_hundred_comes_twice_and_thousands_take_seconds():
    threads, start = torch.get_num_threads(), time.perf_counter()
    pixels = torch.cat([make(tries(1500, 20_000), seed=seed).pixels for seed in (4, 5)]).flatten(1)
    assert time.perf_counter() - start < tries(20, 200)
    assert torch.get_num_threads() == threads
    assert len(pixels.unique(dim=0)) > 0.99 * len(pixels)


MISTAKES = {
    "no sprites": ({"count": 0}, "one or more"),
    "fewer": ({"count": -3}, "one or more"),
    "a seed below 0": ({"seed": -1}, "out of range"),
    "a seed of 65 bits": ({"seed": 2**63}, "out of range"),
    "an unknown class": (
        {"classes": ["sword", "sward"]},
        f"unknown class 'sward'\n  fix: choose one of: {', '.join(CLASSES)}",
    ),
    "no class": ({"classes": []}, "no class"),
}


@pytest.mark.parametrize(("given", "told"), MISTAKES.values(), ids=MISTAKES)
def test_what_cannot_be_made_is_told(given, told):
    with pytest.raises(BadArgument, match=told):
        make(**{"count": 1, **given})


@pytest.mark.gpu
def test_cuda_draws_the_same_bytes():
    here, there = make(3200, seed=7), make(3200, seed=7, device="cuda")
    for name in CLASSES:
        assert torch.equal(here.of(name).pixels, there.of(name).pixels.cpu()), name
    assert torch.equal(here.labels, there.labels.cpu())
    assert torch.equal(here.palette, there.palette.cpu())
