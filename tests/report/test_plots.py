"""Plots: real image files, for every shape that a report can have."""

from dataclasses import replace
from io import BytesIO
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rcParams
from PIL import Image

from hotloop.records import Epoch, Report
from hotloop.report.plots import DARK, LIGHT, confusion, loss_curve, smoothed

from .reports import made_report


def size_of(png: bytes) -> tuple[int, int]:
    with Image.open(BytesIO(png)) as image:
        image.load()
        return image.size


def test_the_same_report_gives_the_same_picture_dense_enough_for_a_sharp_screen() -> None:
    picture = loss_curve(made_report())
    assert size_of(picture) == (1800, 920)
    assert loss_curve(made_report(), theme=LIGHT) == picture
    assert loss_curve(made_report(), theme=DARK) != picture


def test_an_svg_is_well_formed_and_has_no_date_and_no_global_setting_changes() -> None:
    before = dict(rcParams)
    svg = loss_curve(made_report(), "svg", DARK)
    root = ElementTree.fromstring(svg)  # noqa: S314  # our own file
    assert root.tag.endswith("svg")
    assert b"<dc:date>" not in svg
    assert dict(rcParams) == before


SIXTY = tuple(Epoch(n, 0.5, 10, 0.1, {}, {"accuracy": 0.1}) for n in range(1, 61))


@pytest.mark.parametrize(
    "report",
    [
        replace(made_report(), epochs=(), curve=()),
        replace(made_report(), epochs=(Epoch(1, 0.5, 10, 0.1, {}, {"BLEU": 31.5}),), curve=()),
        replace(made_report(), epochs=(), curve=((1, 0.0), (2, 0.0))),
        replace(made_report(), epochs=(Epoch(1, 0.5, 10, 0.1, {}, {}),), curve=((1, 2.5),)),
        replace(made_report(), epochs=SIXTY, curve=((1, -3.0), (2, 4.0), (3, 1e12))),
    ],
    ids=["nothing", "no curve, another metric", "no epoch, zeros", "one point, no metric", "wild, 60 epochs"],
)
def test_odd_reports_still_give_a_picture(report: Report) -> None:
    assert size_of(loss_curve(report))[0] == 1800


def test_smoothing_keeps_a_line_straight_to_its_ends() -> None:
    line = np.linspace(3.0, 1.0, 50)
    assert np.allclose(smoothed(list(line), 9), line)


def test_smoothing_keeps_the_number_of_values() -> None:
    for count in (1, 2, 5):
        assert len(smoothed([1.0] * count, 40)) == count


def test_a_confusion_matrix_is_a_picture() -> None:
    png = confusion([[5, 1], [0, 6]], ["sword", "key"])
    assert png.startswith(b"\x89PNG")
    assert png != confusion([[6, 0], [0, 6]], ["sword", "key"])
