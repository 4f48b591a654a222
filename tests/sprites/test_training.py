"""Both trainings, the files they leave, and how their results are judged; real, but small."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hotloop.apps.sprites.dataset import SpriteSet
from hotloop.apps.sprites.making import make
from hotloop.apps.sprites.models import Classifier, Drawer, Size, cost_of
from hotloop.apps.sprites.network_files import TrainedNetwork, kind_of
from hotloop.apps.sprites.quality import confusions, drawn_by, judge, sorted_by
from hotloop.apps.sprites.recipes import Recipe, batches, learn_to_draw, learn_to_sort, recipe_for
from hotloop.errors import BadArgument, DoesNotFit

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
    recipe = Recipe(width=4, epochs=1, batch=32)
    one, two = (learn_to_draw(sprites[:96], recipe, device="cpu", progress=False)[0].model for _ in range(2))
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


def test_what_is_drawn_is_judged(sorter: TrainedNetwork, drawer: TrainedNetwork, sprites: SpriteSet) -> None:
    drawn = drawn_by(drawer, torch.arange(3).repeat_interleave(8), "cpu", seed=4, steps=6)
    verdict = judge(drawn, sorter, sprites, "cpu")
    assert verdict.drawn == 24
    assert set(verdict.right_by_class) == set(KINDS)
    assert 0 <= verdict.right <= 1
    assert verdict.copies == 0
    assert judge(drawn, sorter, None, "cpu").copies is None


def test_copies_are_counted(sorter: TrainedNetwork, sprites: SpriteSet) -> None:
    verdict = judge(sprites[:100], sorter, sprites, "cpu")
    assert verdict.copies == 1.0
    assert verdict.right > 0.9


@pytest.mark.parametrize("kind", ["classifier", "drawer"])
def test_a_network_comes_back_from_its_file(
    kind, sorter: TrainedNetwork, drawer: TrainedNetwork, tmp_path: Path
) -> None:
    trained = sorter if kind == "classifier" else drawer
    trained.save(tmp_path / "net.safetensors")
    assert kind_of(tmp_path / "net.safetensors") == kind
    loaded = TrainedNetwork.load(tmp_path / "net.safetensors", kind)
    assert loaded.classes == KINDS
    for name, value in trained.model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name])


def test_files_that_are_something_else(sorter: TrainedNetwork, sprites: SpriteSet, tmp_path: Path) -> None:
    sprites.save(tmp_path / "set.safetensors")
    sorter.save(tmp_path / "net.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "net.safetensors").read_bytes()[:500])
    with pytest.raises(BadArgument, match="not hotloop-classifier"):
        TrainedNetwork.load(tmp_path / "set.safetensors", "classifier")
    with pytest.raises(BadArgument, match="holds hotloop-classifier, not hotloop-drawer"):
        TrainedNetwork.load(tmp_path / "net.safetensors", "drawer")
    with pytest.raises(BadArgument, match="cannot be read"):
        TrainedNetwork.load(tmp_path / "cut.safetensors", "classifier")
    with pytest.raises(BadArgument, match="there is no file"):
        kind_of(tmp_path / "none.safetensors")
    with pytest.raises(BadArgument, match="not a network"):
        kind_of(tmp_path / "set.safetensors")


def test_a_damaged_network_is_told(sorter: TrainedNetwork, tmp_path: Path) -> None:
    wrong = TrainedNetwork("classifier", Classifier(Size(3, 4)), KINDS, sorter.palette)
    wrong.model.size = Size(3, 16)  # type: ignore[assignment]
    wrong.save(tmp_path / "net.safetensors")
    with pytest.raises(BadArgument, match="is damaged"):
        TrainedNetwork.load(tmp_path / "net.safetensors", "classifier")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("size", {"classes": 3, "width": width}) for width in (1_000_000, 10**30, 7, 0, -8, 8.0, "8", None)),
        *(("size", {"classes": classes, "width": 8}) for classes in (10**12, 0, -3, None)),
        *(("size", value) for value in (None, {}, [], "large", {"width": 8})),
        *(("classes", value) for value in (None, [], ["sword"], [1, 2, 3], 3, "abc", [["a"], ["b"], ["c"]])),
        *(("palette", value) for value in (torch.zeros(0), torch.zeros(17, 4), torch.zeros(3, dtype=torch.uint8))),
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
    with pytest.raises(BadArgument, match=r"is damaged: .*\n  fix: `hotloop sprites train` makes one"):
        TrainedNetwork.load(file, "classifier")


@pytest.mark.parametrize("network", [Classifier, Drawer])
def test_what_a_network_would_hold_is_known_before_it_is_built(network: type[Classifier] | type[Drawer]) -> None:
    for size in (Size(3, 1), Size(2, 5), Size(16, 12)):
        built = network(size)
        assert cost_of(network, size).weights == sum(tensor.numel() for tensor in built.state_dict().values())


def test_other_classes_are_refused(sorter: TrainedNetwork) -> None:
    with pytest.raises(BadArgument, match=r"(?s)other classes.*fix: train on that set: hotloop sprites train mine"):
        sorter.must_know(make(8, classes=("gem", "key")), "mine")
    sorter.must_know(make(8, classes=KINDS), "mine")


def test_sorting_needs_no_labels(sorter: TrainedNetwork, sprites: SpriteSet) -> None:
    assert sorted_by(sorter, sprites[:10], "cpu").shape == (10,)


@pytest.mark.parametrize("wrong", [{"width": 0}, {"epochs": -1}, {"batch": 0}, {"rate": 0.0}])
def test_recipes_that_cannot_be_meant(wrong: dict[str, float]) -> None:
    with pytest.raises(BadArgument, match="give"):
        Recipe(**{"width": 4, "epochs": 1, **wrong})  # type: ignore[arg-type]


def test_too_few_sprites_for_a_batch() -> None:
    with pytest.raises(BadArgument, match="fewer than one batch"):
        learn_to_draw(make(5, classes=KINDS), Recipe(width=4, epochs=1), device="cpu")


def test_recipes_suit_the_device() -> None:
    for task in ("classify", "draw"):
        assert recipe_for(task, torch.device("cuda")).width > recipe_for(task, torch.device("cpu")).width  # type: ignore[arg-type]


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


@pytest.mark.parametrize("width", [1_000_000, 10**30])
def test_what_there_is_no_memory_for_is_refused_before_it_is_built(sprites: SpriteSet, width: int) -> None:
    with pytest.raises(DoesNotFit, match=rf"width {width:,} takes .* free on cpu\n  fix: choose a smaller width"):
        learn_to_sort(sprites, sprites, Recipe(width=width, epochs=1), device="cpu")
    with pytest.raises(DoesNotFit, match="smaller width or batch"):
        learn_to_draw(sprites, Recipe(width=width, epochs=1), device="cpu")
