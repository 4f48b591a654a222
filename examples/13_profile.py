"""Where does a step's time go, and which line is it? A stopwatch by hand, then loop.profile."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hotloop
from hotloop.printing.text import duration
from hotloop.profiling.advice import part_words

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Pictures(Dataset):
    """Made-up pictures, each drawn when it is asked for: that takes time, as decoding a file does."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        large = torch.rand(3, 128, 128, generator=torch.Generator().manual_seed(index))
        return nn.functional.avg_pool2d(large, 4), index % 5


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 16, 3, stride=2)
        self.head = nn.Linear(256, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        x = self.second(x).relu()
        return self.head(nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))


def make() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(0)
    model = Classifier()
    return model, torch.optim.AdamW(model.parameters()), DataLoader(Pictures(), 32, shuffle=True)


def plain() -> None:
    print("--- Plain PyTorch: a stopwatch in the loop ---")
    model, optimizer, loader = make()
    model.to(DEVICE)
    criterion, waited, computed = nn.CrossEntropyLoss(), 0.0, 0.0
    last = time.perf_counter()
    for x, y in loader:
        ready = time.perf_counter()
        optimizer.zero_grad()
        loss = criterion(model(x.to(DEVICE)), y.to(DEVICE))
        loss.backward()
        optimizer.step()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()  # else only the queueing is timed; and now every step waits
        end = time.perf_counter()
        waited, computed, last = waited + ready - last, computed + end - ready, end
    print(f"a step: {duration(waited / len(loader))} for the batch, {duration(computed / len(loader))} for the rest")
    print("Which line of the rest? Which is copying, which is Python? Each answer needs another stopwatch.")


def with_hotloop() -> None:
    model, optimizer, loader = make()
    loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss())
    before = [p.clone() for p in model.parameters()]
    found = loop.profile(loader, steps=10, progress=False)
    print(f"\n--- With hotloop: loop.profile, {found.steps} steps on {found.device} ---")
    for name, share in found.parts.shares.items():
        if share:
            seconds = found.parts.seconds[name] / found.steps
            print(f"{part_words(name, found.device):45} {share:6.1%}  {duration(seconds)}")
    print(f"{'all of a step':45} {sum(found.parts.shares.values()):6.1%}  {duration(found.mean)}")

    print("\nThe costliest operations, by your own line:")
    for operation in found.operations[:5]:
        line = operation.line
        where = "unknown" if line is None else f"{line}  {line.code}"
        print(f"{operation.share:6.1%}  {operation.name}, {operation.phase}: {where}")
    for advice in found.advice:
        print(f"\n{advice.what}\n  fix: {advice.fix}")
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    print(f"\nNo trace of it stays; the weights are as before: {same}")


def main() -> None:
    plain()
    with_hotloop()


if __name__ == "__main__":
    main()
