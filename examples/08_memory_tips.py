"""What fills the memory in training, and six ways to need less."""

import weakref

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import hotloop
from hotloop.text import size

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ALIVE: weakref.WeakSet["Kept"] = weakref.WeakSet()


class Kept:
    """A tensor that PyTorch keeps for the backward pass; this counts them on any device, the CPU too."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach()
        ALIVE.add(self)


def kept(model: nn.Module) -> str:
    """Bytes that are kept for a backward pass right now, beside the weights themselves."""
    storages = {k.tensor.untyped_storage().data_ptr(): k.tensor.untyped_storage().nbytes() for k in ALIVE}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return f"{size(sum(n for where, n in storages.items() if where not in weights)):>9}"


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(12))
    return nn.Sequential(*layers, nn.Linear(128, 1)).to(DEVICE)


def data(items: int) -> torch.Tensor:
    return torch.rand(items, 128, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def plain() -> None:
    print(f"--- Plain PyTorch: what is kept for the backward pass, on {DEVICE} ---")
    model = make_model()
    for items in (64, 256, 1024):
        loss = model(data(items)).mean()
        print(f"a batch of {items:4}      {kept(model)}   1. a smaller batch keeps less")
    del loss
    print(f"after `del loss`     {kept(model)}   2. let go of what you do not need")
    total = torch.zeros((), device=DEVICE)
    for _ in range(3):
        total += model(data(1024)).mean()  # the sum remembers how it was made: every batch stays
    print(f"total += loss, 3x    {kept(model)}   3. write total += loss.detach()")
    with torch.inference_mode():
        total = model(data(1024)).mean()
    print(f"in inference_mode    {kept(model)}   4. nothing is kept where nothing is learned")
    loss = checkpoint_sequential(model, 4, data(1024), use_reentrant=False).mean()
    print(f"with checkpoint      {kept(model)}   5. keep the start of each quarter, compute the rest again in backward")
    loss.backward()


def caching() -> None:
    print("\n--- Plain PyTorch: del and empty_cache ---")
    if DEVICE.type != "cuda":
        print("PyTorch does not count the memory of a CPU. On a CUDA GPU, this part shows memory_allocated.")
        return
    block = torch.empty(64, 2**20, device=DEVICE)
    allocated, reserved = torch.cuda.memory_allocated, torch.cuda.memory_reserved
    print(f"with a block of 256 MiB   allocated {size(allocated()):>9}   reserved {size(reserved()):>9}")
    del block
    print(f"after del                 allocated {size(allocated()):>9}   reserved {size(reserved()):>9}")
    torch.cuda.empty_cache()  # rarely needed: reserved memory is used again, and asking for it anew is slow
    print(f"after empty_cache         allocated {size(allocated()):>9}   reserved {size(reserved()):>9}")
    print(f"highest so far            allocated {size(torch.cuda.max_memory_allocated()):>9}")


def updated(pieces: list[int], by_hotloop: bool = False) -> torch.Tensor:
    """The last layer after one update from 10 items, taken in micro-batches of these sizes."""
    model, criterion = make_model(), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches = list(zip(data(10).split(pieces), data(10)[:, :1].split(pieces), strict=True))
    if by_hotloop:
        hotloop.Loop(model, optimizer, criterion, accumulate=len(pieces)).fit(batches, progress=False)
    else:
        for x, y in batches:
            (criterion(model(x), y) / len(pieces)).backward()  # gradients add up until zero_grad()
        optimizer.step()
    return model[-1].weight.detach().cpu()


def accumulation() -> None:
    print("\n--- Plain PyTorch: 6. a batch of 10 does not fit? Take 4 + 4 + 2 items ---")
    full = updated([10])
    print(f"loss / 3 for each piece: off by {(updated([4, 4, 2]) - full).abs().max():.0e}, the last two count double")
    print("\n--- With hotloop: Loop(..., accumulate=3) ---")
    print(f"each item counts once:   off by {(updated([4, 4, 2], True) - full).abs().max():.0e}, which is rounding")
    model = make_model()
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss())
    report = loop.fit([(data(1024), data(1024)[:, :1])], progress=False)
    print(f"the report of loop.fit on {report.device}: highest memory {size(report.peak_memory)}")


def main() -> None:
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda saved: saved.tensor):
        plain()
        caching()
        accumulation()


if __name__ == "__main__":
    main()
