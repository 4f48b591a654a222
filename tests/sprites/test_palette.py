"""The palette: sixteen colours, told apart, and ramps that get lighter."""

from hotloop.apps.sprites.dataset import COLOURS
from hotloop.apps.sprites.palette import INK, RAMPS, RGB, palette_tensor


def luminance(colour: int) -> float:
    red, green, blue = RGB[colour - 1]
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_the_table_has_a_clear_row_and_sixteen_opaque_colours():
    table = palette_tensor()
    assert table.shape == (COLOURS + 1, 4)
    assert table.dtype.itemsize == 1
    assert table[0].tolist() == [0, 0, 0, 0]
    assert (table[1:, 3] == 255).all()
    assert tuple(table[INK, :3].tolist()) == RGB[INK - 1]


def test_colours_are_distinct():
    assert len(set(RGB)) == COLOURS


def test_ramps_go_from_dark_to_light():
    for name, (dark, mid, light) in RAMPS.items():
        assert luminance(dark) < luminance(mid) <= luminance(light), name
