"""Deal out the items of an epoch to several processes.

`share(rank, world, epoch)` returns the numbers of the items that a process
trains on. Every process trains on all 12 now. Each item must be trained on by
exactly one process in each epoch, and the order must differ from epoch to
epoch. torch.utils.data.DistributedSampler does it.
"""

from torch.utils.data import DistributedSampler

ITEMS = 12


def share(rank, world, epoch):
    return list(range(ITEMS))


for epoch in range(2):
    for rank in range(2):
        print(f"epoch {epoch}, rank {rank}: {share(rank, 2, epoch)}")
