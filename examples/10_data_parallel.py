"""More than one GPU: nn.DataParallel, and what to use instead. Shown with two processes on the CPU, anywhere."""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hotloop

PROCESSES = 2


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same weights in every process
    return nn.Linear(4, 1)


def make_data() -> TensorDataset:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def weights_of_one_process() -> torch.Tensor:
    """The truth to compare with: one process, one step on the whole batch of 16."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = make_data().tensors
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    return model.weight.detach()


def data_parallel() -> None:
    print("--- Plain PyTorch: nn.DataParallel ---")
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = nn.DataParallel(make_model().to(device))  # one process that splits each batch over all GPUs
    print(f"GPUs it splits over: {len(model.device_ids)}; output {tuple(model(torch.ones(16, 4).to(device)).shape)}")
    print("With one GPU or none it passes everything through. With more it works, but one Python process feeds")
    print("them all and copies the model in every step, so PyTorch itself advises DistributedDataParallel.")


def plain_worker(rank: int) -> torch.Tensor:
    model = DistributedDataParallel(make_model())  # backward() averages the gradients over the processes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (t.chunk(PROCESSES)[rank] for t in make_data().tensors)  # this process takes its share
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    return model.module.weight.detach()


def hotloop_worker(rank: int) -> torch.Tensor:
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = hotloop.Loop(model, optimizer, nn.MSELoss(), device="cpu")
    sampler = DistributedSampler(make_data(), PROCESSES, rank)  # deals the items out, the same way every time
    for batch in loop.batches(DataLoader(make_data(), batch_size=8, sampler=sampler)):
        loop.step(batch)
    return model.module.weight.detach()


def tell(rank: int, weights: torch.Tensor) -> None:
    """Every process reports to the first one, and the first one prints."""
    gathered = [torch.empty_like(weights) for _ in range(PROCESSES)]
    dist.all_gather(gathered, weights)
    if rank == 0:
        difference = (weights - weights_of_one_process()).abs().max()
        print("all processes have the same weights:", all(torch.equal(weights, other) for other in gathered))
        print("same as one process on all 16 items:", torch.allclose(weights, weights_of_one_process(), atol=1e-6))
        print(f"largest difference: {difference:.0e}", flush=True)


def worker(rank: int, store: str) -> None:
    """What each process runs. It starts with nothing, so it must be a function at the top of the file."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # both live on this machine: no network needed
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    if rank == 0:
        print("\n--- Plain PyTorch: DistributedDataParallel, 2 processes ---", flush=True)
    tell(rank, plain_worker(rank))
    if rank == 0:
        print("\n--- With hotloop: Loop(DistributedDataParallel(model), ...) in each process ---", flush=True)
    tell(rank, hotloop_worker(rank))
    dist.destroy_process_group()


def main() -> None:
    data_parallel()
    print("\nThe rule is one GPU per process. Here both processes use the CPU and 'gloo', so that this runs anywhere;")
    print(f"with a GPU each they would use 'nccl' and torchrun. GPUs here: {torch.cuda.device_count()}.", flush=True)
    with tempfile.TemporaryDirectory() as folder:  # the processes find each other through a file
        torch.multiprocessing.spawn(worker, (str(Path(folder, "meeting-point")),), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
