"""Pictures for a page are encoded quickly: tests look at their pixels and sizes, and at no file's length."""

from typing import Any

import PIL.Image
import pytest

SAVE = PIL.Image.Image.save


def save_quickly(image: PIL.Image.Image, *to: Any, **options: Any) -> None:
    SAVE(image, *to, **{"compress_level": 1} | options)


@pytest.fixture(autouse=True)
def _quick_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image.Image, "save", save_quickly)
