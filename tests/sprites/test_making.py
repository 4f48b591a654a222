"""`make`: the same sprites for the same seed, whatever else is made, wherever it is made."""

import hashlib
import time

import pytest
import torch

from hotloop.apps.sprites import making
from hotloop.apps.sprites.making import CLASSES, draw, make
from hotloop.errors import BadArgument

from ..thorough import THOROUGH

# A change of any pixel shows here: look at the sprites before and after, then write down the new sums.
GOLDEN = {
    0: "2c55faaa194643ddcfa05c9b70dc27aeb49d9ea5d1b380737f893746d3bdbf1d",
    7: "041e7e18e67d9cbd064e047216fa2c10419d778212696a1522f9877ae05c893c",
    2**63 - 1: "45ba2587cb30d9d395fdd2cf60e5702395299368a419dee7ca3a331dd75f7431",
}


@pytest.mark.parametrize("seed", GOLDEN)
def test_the_bytes_are_those_of_every_other_machine(seed):
    sprites = make(64, seed=seed)
    data = sprites.pixels.numpy().tobytes() + sprites.labels.numpy().tobytes()
    assert hashlib.sha256(data).hexdigest() == GOLDEN[seed]


def test_a_set_says_what_it_is():
    sprites = make(20, seed=7)
    assert sprites.classes == CLASSES
    assert sprites.source == "made by hotloop, seed 7"
    assert (sprites.pixels.dtype, sprites.labels.dtype) == (torch.uint8, torch.int64)
    assert sprites.palette.shape == (17, 4)


def test_the_first_sprites_do_not_depend_on_how_many_follow():
    few, many = make(100, seed=5), make(1000, seed=5)
    assert torch.equal(few.pixels, many.pixels[:100])
    assert torch.equal(few.labels, many.labels[:100])


def test_chunks_leave_no_trace(monkeypatch):
    whole = make(100, seed=5)
    monkeypatch.setattr(making, "CHUNK", 37)
    pieces = make(100, seed=5)
    assert torch.equal(whole.pixels, pieces.pixels)
    assert torch.equal(whole.labels, pieces.labels)


def test_a_sprite_depends_only_on_seed_number_and_class():
    sprites = make(300, seed=9)
    for name in CLASSES:
        numbers = (sprites.labels == sprites.label(name)).nonzero()[:, 0]
        assert torch.equal(sprites.pixels[numbers], draw(name, numbers, seed=9))
        backwards = numbers.flip(0)
        assert torch.equal(sprites.pixels[backwards], draw(name, backwards, seed=9))


def test_every_class_comes_equally_often_and_mixed():
    sprites = make(160, seed=3)
    assert torch.bincount(sprites.labels).tolist() == [10] * len(CLASSES)
    rounds = sprites.labels.view(10, len(CLASSES))
    assert len({tuple(order) for order in rounds.tolist()}) == 10


def test_some_classes_only():
    sprites = make(60, seed=3, classes=["gem", "sword", "gem"])
    assert sprites.classes == ("gem", "sword")
    swords = (sprites.labels == 1).nonzero()[:, 0]
    assert len(swords) == 30
    assert torch.equal(sprites.pixels[swords], draw("sword", swords, seed=3))
    assert make(3, classes="tree").classes == ("tree",)


def test_seeds_differ():
    one, other = make(200, seed=1), make(200, seed=2)
    same = (one.pixels == other.pixels).flatten(1).all(1)
    assert int(same.sum()) < 3


def test_fewer_than_one_in_a_hundred_comes_twice_and_thousands_take_seconds():
    threads = torch.get_num_threads()
    start = time.perf_counter()
    pixels = make(4000, seed=4).pixels.flatten(1)
    assert time.perf_counter() - start < 20
    assert torch.get_num_threads() == threads
    if THOROUGH:
        pixels = make(20_000, seed=4).pixels.flatten(1)
    assert len(pixels.unique(dim=0)) > 0.99 * len(pixels)


@pytest.mark.parametrize("count", [0, -3])
def test_no_sprites_at_all(count):
    with pytest.raises(BadArgument, match="one or more"):
        make(count)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range(seed):
    with pytest.raises(BadArgument, match="out of range"):
        make(1, seed=seed)


def test_an_unknown_class_lists_those_there_are():
    with pytest.raises(BadArgument, match="unknown class 'sward'") as caught:
        make(1, classes=["sword", "sward"])
    assert all(name in str(caught.value) for name in CLASSES)
    with pytest.raises(BadArgument, match="no class"):
        make(1, classes=[])


@pytest.mark.gpu
def test_cuda_draws_the_same_bytes():
    here, there = make(3200, seed=7), make(3200, seed=7, device="cuda")
    for name in CLASSES:
        assert torch.equal(here.of(name).pixels, there.of(name).pixels.cpu()), name
    assert torch.equal(here.labels, there.labels.cpu())
    assert torch.equal(here.palette, there.palette.cpu())
