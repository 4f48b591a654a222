"""The picture of what a classifier sees in the plane."""

from io import BytesIO

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from hotloop.report.plane import COLOURS, NIGHT, Points, Stage, disc, painted, strip

POINTS = Points(np.array([[0.1, 0.2], [-0.5, 0.5]]), np.array([0, 4]))


def stage(classes: int = 5) -> Stage:
    chances = np.random.default_rng(0).dirichlet(np.ones(classes), size=(16, 16))
    return Stage("epoch 1", "20% right", chances)


def test_where_the_model_is_sure_the_spot_has_the_colour_of_the_class() -> None:
    for number, colour in enumerate(COLOURS):
        chances = np.eye(5)[number].reshape(1, 1, 5)
        assert painted(chances)[0, 0] == pytest.approx(to_rgb(colour))


def test_where_it_only_guesses_it_is_night() -> None:
    assert painted(np.full((1, 1, 5), 0.2))[0, 0] == pytest.approx(to_rgb(NIGHT))


@pytest.mark.parametrize("classes", [2, 5, 7])
def test_colours_are_colours_for_any_number_of_classes(classes: int) -> None:
    colours = painted(stage(classes).chances)
    assert colours.shape == (16, 16, 3)
    assert 0 <= colours.min() <= colours.max() <= 1


def test_a_strip_grows_with_its_stages() -> None:
    sizes = []
    for count in (1, 3):
        with Image.open(BytesIO(strip([stage()] * count, POINTS, 1.0))) as image:
            sizes.append(image.size)
    assert sizes == [(600, 712), (1800, 712)]


def test_a_disc_has_clear_corners_and_a_filled_middle() -> None:
    with Image.open(BytesIO(disc(stage(), POINTS, 1.0))) as image:
        alpha = image.convert("RGBA").getchannel("A")
        assert alpha.getpixel((0, 0)) == 0
        assert alpha.getpixel((image.width // 2, image.height // 2)) == 255
