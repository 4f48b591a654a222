# style: prints the GPU's name and memory statistics, empties the cache, guards all of it
# steps: 4
# expect: nothing

import gc

import torch
from torch import nn


def report(when):
    if not torch.cuda.is_available():
        return
    free, total = torch.cuda.mem_get_info()
    print(when, f"{torch.cuda.memory_allocated() / 2**20:.1f} MiB allocated,", end=" ")
    print(f"{torch.cuda.memory_reserved() / 2**20:.1f} MiB reserved, {free / total:.0%} free")


def describe():
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        print(card.name, f"{card.total_memory / 2**30:.0f} GiB, capability {card.major}.{card.minor}")
        print("bf16:", torch.cuda.is_bf16_supported(), "count:", torch.cuda.device_count())


def main():
    describe()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    report("model")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        x = torch.randn(64, 256, device=device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    report("trained")
    if torch.cuda.is_available():
        print(f"peak {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
        print(torch.cuda.memory_summary(abbreviated=True)[:200])
    del x
    gc.collect()
    torch.cuda.empty_cache()
    report("emptied")


if __name__ == "__main__":
    main()
