"""The model's buckets beside those that PyTorch's DDP makes."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hotloop.apps.simulate.scaling import GradientReady
from hotloop.apps.simulate.scaling.model import buckets


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("widths", [range(512, 1600, 64), [16, 64, 1], [2048, 2048, 2048, 2048]])
def test_buckets_are_those_that_pytorch_makes(widths: list[int]) -> None:
    model = nn.Sequential(*(nn.Linear(first, second) for first, second in pairwise(widths)))
    came: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: came.append(p.numel() * p.element_size()))
    parallel = DistributedDataParallel(model)
    for _ in range(3):  # it makes them anew after the first backward pass, in the order of the gradients
        came.clear()
        parallel(torch.randn(2, widths[0])).sum().backward()
    theirs = parallel._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    ours = [size for size, _ in buckets([GradientReady(size, 1.0) for size in came])]
    assert ours == [int(size) for size in theirs.split(",")]
