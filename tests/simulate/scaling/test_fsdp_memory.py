"""The memory of a rank under FSDP beside what PyTorch's own tracker counts, on a group of ranks that do not exist."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hotloop.apps.simulate.scaling import rank_memory

tracking = pytest.importorskip("torch.distributed._tools.fsdp2_mem_tracker")
RANKS, WIDTH, BLOCKS, ITEMS = 8, 64, 5, 4

pytestmark = pytest.mark.filterwarnings("ignore")  # of a tracker that PyTorch itself calls a prototype


@pytest.fixture
def group() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.up(x).relu())
        return x + down


def size_of(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


@pytest.mark.usefixtures("group")
def test_the_peak_of_backward_is_that_of_pytorchs_tracker() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (RANKS,))
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WIDTH))
        total, block = size_of(model), size_of(model[1])
        for each in [*model[1:-1], model]:
            fully_shard(each, mesh=mesh)
        x = torch.rand(ITEMS, WIDTH)
        tracker = tracking.FSDPMemTracker(model)
        tracker.track_inputs((x,))
        with tracker:
            model(x).sum().backward()
        [seen] = tracker.get_tracker_snapshot("peak").values()
        told = {getattr(kind, "value", kind): amount for kind, amount in seen.items()}
    there = RANKS * told["Sharded Grad"] + block  # gradients that one GPU would have at that moment
    other = told["Activation"] + told["Inputs"]
    sizes = {"parameters": total, "gradients": there, "optimizer": 0, "other": other, "root": total - BLOCKS * block}
    found = rank_memory("fsdp", RANKS, largest=block, **sizes)
    assert found.whole == told["Unsharded Param"] + told["All Gather"]
    assert found.total == pytest.approx(told["Total"], rel=0.05)
