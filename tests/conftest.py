"""What all tests share: the `gpu` marker, and a torch that does not fight over the cores."""

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none (`hotloop device` says why)")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
