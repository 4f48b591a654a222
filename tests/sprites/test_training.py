"""Both trainings, the files they leave, and how their results are judged; real, but small."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hotloop.apps.sprites.dataset import SpriteSet
from hotloop.apps.sprites.making import make
from hotloop.apps.sprites.models import WIDEST, Classifier, Size
from hotloop.apps.sprites.network_files import TrainedNetwork
from hotloop.apps.sprites.quality import confusions, drawn_by, judge
from hotloop.apps.sprites.recipes import Recipe, batches, learn_to_draw, learn_to_sort
from hotloop.errors import BadArgument

KINDS = ("sword", "heart", "tree")


@pytest.fixture(scope="module")
def sprites() -> SpriteSet:
    return make(256, seed=1, classes=KINDS)


@pytest.fixture(scope="module")
def sorter(sprites: SpriteSet) -> TrainedNetwork:
    held_out = make(96, seed=2, classes=KINDS)
    trained, report = learn_to_sort(
        sprites, held_out, Recipe(width=8, epochs=3, batch=16, rate=5e-3), device="cpu", progress=False
    )
    assert report.epochs[-1].metrics["accuracy"] > 0.95
    return trained


@pytest.fixture(scope="module")
def drawer(sprites: SpriteSet) -> TrainedNetwork:
    trained, report = learn_to_draw(
        sprites, Recipe(width=8, epochs=1, batch=16, rate=1e-2), device="cpu", progress=False
    )
    assert report.curve[-1][1] < 0.8 * report.curve[0][1]
    return trained


def test_the_same_recipe_gives_the_same_network(sprites: SpriteSet) -> None:
    recipe = Recipe(width=2, epochs=1, batch=32)
    one, two = (learn_to_draw(sprites[:64], recipe, device="cpu", progress=False)[0].model for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_batches_are_whole_tensors_and_every_sprite_comes_once(sprites: SpriteSet) -> None:
    seen = torch.cat([pixels for pixels, _ in batches(sprites, 100)])
    assert torch.equal(seen, sprites.pixels)
    shuffled = torch.cat([labels for _, labels in batches(sprites, 64, seed=1)])
    assert torch.equal(shuffled.bincount(), sprites.labels.bincount())


def test_confusions_add_up(sorter: TrainedNetwork, sprites: SpriteSet) -> None:
    table = confusions(sorter, sprites, "cpu")
    assert int(table.sum()) == len(sprites)
    assert torch.equal(table.sum(1), sprites.labels.bincount())
    assert table.diagonal().sum() / table.sum() > 0.95


def test_what_is_drawn_is_judged_and_copies_are_counted(
    sorter: TrainedNetwork, drawer: TrainedNetwork, sprites: SpriteSet
) -> None:
    drawn = drawn_by(drawer, torch.arange(3).repeat_interleave(8), "cpu", seed=4, steps=6)
    verdict = judge(drawn, sorter, sprites, "cpu")
    assert (verdict.drawn, set(verdict.right_by_class), verdict.copies) == (24, set(KINDS), 0)
    assert 0 <= verdict.right <= 1
    assert judge(drawn, sorter, None, "cpu").copies is None
    known = judge(sprites[:100], sorter, sprites, "cpu")
    assert known.copies == 1.0
    assert known.right > 0.9


@pytest.mark.parametrize("kind", ["classifier", "drawer"])
def test_a_network_comes_back_from_its_file(
    kind, sorter: TrainedNetwork, drawer: TrainedNetwork, tmp_path: Path
) -> None:
    trained = sorter if kind == "classifier" else drawer
    trained.save(tmp_path / "net.safetensors")
    loaded = TrainedNetwork.load(tmp_path / "net.safetensors")
    assert (loaded.kind, loaded.classes) == (kind, KINDS)
    for name, value in trained.model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name])


def test_files_that_are_something_else(sorter: TrainedNetwork, sprites: SpriteSet, tmp_path: Path) -> None:
    sprites.save(tmp_path / "set")
    sorter.save(tmp_path / "net")
    (tmp_path / "cut").write_bytes((tmp_path / "net").read_bytes()[:500])
    wrong = TrainedNetwork("classifier", Classifier(Size(3, 4)), KINDS, sorter.palette)
    wrong.model.size = Size(3, 16)  # type: ignore[assignment]
    wrong.save(tmp_path / "damaged")
    for name, kinds, says in (
        ("set", (), "not hotloop-classifier or hotloop-drawer"),
        ("net", ("drawer",), "holds hotloop-classifier, not hotloop-drawer"),
        ("cut", ("classifier",), "cannot be read"),
        ("none", (), "there is no file"),
        ("damaged", ("classifier",), "is damaged"),
    ):
        with pytest.raises(BadArgument, match=says):
            TrainedNetwork.load(tmp_path / name, *kinds)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("size", {"classes": 3, "width": width}) for width in (10**30, 7, -8, "8", None)),
        *(("size", {"classes": classes, "width": 8}) for classes in (10**12, -3)),
        *(("size", value) for value in (None, [], "large", {"width": 8})),
        *(("classes", value) for value in (None, ["sword"], [1, 2, 3], "abc")),
        *(("palette", value) for value in (torch.zeros(0), torch.zeros(17, 4))),
    ],
)
def test_what_a_file_says_of_itself_is_held_against_what_it_has(
    sorter: TrainedNetwork, tmp_path: Path, name: str, value: object
) -> None:
    file = tmp_path / "net.safetensors"
    sorter.save(file)
    with safe_open(file, framework="pt") as opened:
        about = json.loads(opened.metadata()["hotloop"])
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # not a dict
    (tensors if isinstance(value, torch.Tensor) else about)[name] = value
    save_file(tensors, file, metadata={"hotloop": json.dumps(about)})
    with pytest.raises(BadArgument, match=r"is damaged: .*\n  fix: `hotloop sprites train` makes"):
        TrainedNetwork.load(file, "classifier")


def test_other_classes_are_refused(sorter: TrainedNetwork) -> None:
    with pytest.raises(BadArgument, match=r"(?s)other classes.*fix: train on that set: hotloop sprites train mine"):
        sorter.must_know(make(8, classes=("gem", "key")), "mine")
    sorter.must_know(make(8, classes=KINDS), "mine")


@pytest.mark.parametrize("wrong", [{"width": 0}, {"width": WIDEST + 1}, {"epochs": -1}, {"batch": 0}])
def test_recipes_that_cannot_be_meant(wrong: dict[str, float]) -> None:
    with pytest.raises(BadArgument, match="fix"):
        Recipe(**{"width": 4, "epochs": 1, **wrong})  # type: ignore[arg-type]


def test_fewer_sprites_than_a_batch_are_one_and_none_are_told() -> None:
    _, report = learn_to_draw(make(5, classes=KINDS), Recipe(width=4, epochs=1), device="cpu", progress=False)
    assert report.steps == 1
    with pytest.raises(BadArgument, match="no sprites to learn from"):
        learn_to_draw(make(5, classes=KINDS)[:0], Recipe(width=4, epochs=1), device="cpu")


@pytest.mark.gpu
def test_both_trainings_on_the_gpu() -> None:
    many = make(8192, seed=1, classes=KINDS, device="cuda")
    sprites = SpriteSet(many.pixels.cpu(), many.labels.cpu(), many.classes, many.palette.cpu())
    sorter, report = learn_to_sort(
        sprites, make(512, seed=2, classes=KINDS), Recipe(width=16, epochs=3), device="cuda", progress=False
    )
    assert report.epochs[-1].metrics["accuracy"] > 0.98
    drawer, _ = learn_to_draw(sprites, Recipe(width=24, epochs=6), device="cuda", progress=False)
    drawn = drawn_by(drawer, torch.arange(3).repeat_interleave(32), "cuda")
    assert judge(drawn, sorter, sprites, "cuda").right > 0.8
