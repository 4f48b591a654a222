"""The training loop of every tutorial, and the same loop with hotloop: same losses, fewer lines to get wrong."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop

EPOCHS = 3


def make_loader() -> DataLoader:
    """Made-up data: is a point inside the circle? Seeded, so that every call gives the same batches."""
    points = torch.rand(1000, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    inside = (points.norm(dim=1) < 0.7).long()
    return DataLoader(
        TensorDataset(points, inside), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(2)
    )


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def plain() -> list[float]:
    print("--- Plain PyTorch ---")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, optimizer = make_model()
    model.to(device)  # 1. the model goes to the device once
    criterion, loader, losses = nn.CrossEntropyLoss(), make_loader(), []
    for epoch in range(EPOCHS):
        for x, y in loader:
            inputs, targets = x.to(device), y.to(device)  # 2. every batch follows it
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())  # makes the CPU wait for the GPU, in every step
        print(f"epoch {epoch + 1}: last loss {losses[-1]:.4f} on {device}")
    return losses


def with_hotloop() -> list[float]:
    print("\n--- With hotloop, your own loop ---")
    model, optimizer = make_model()
    loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss())  # picks the device and moves the model
    loader, losses = make_loader(), []
    for epoch in range(EPOCHS):
        for batch in loop.batches(loader):  # batches arrive on the device
            losses.append(loop.step(batch))  # forward, backward, update; the loss stays there too
        print(f"epoch {epoch + 1}: last loss {losses[-1]:.4f} on {loop.device}")
    return torch.stack(losses).tolist()  # one wait, at the end


def with_fit() -> float:
    print("\n--- With hotloop, in one line ---")
    model, optimizer = make_model()
    loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss())
    report = loop.fit(make_loader(), epochs=EPOCHS, progress=False)  # without progress=False: a bar
    for epoch in report.epochs:
        print(f"epoch {epoch.number}: mean loss {epoch.loss:.4f}, {epoch.items_per_second:,.0f} items/s")
    print(f"{report.steps} steps on {report.device} ({report.device_name})")
    return report.curve[-1][1]


def main() -> None:
    by_hand = plain()
    by_loop = with_hotloop()
    by_fit = with_fit()
    print("\n--- The same training? ---")
    print("steps:", len(by_hand), "and", len(by_loop))
    print("losses equal to the bit:", by_hand == by_loop)
    print("largest difference:", max(abs(a - b) for a, b in zip(by_hand, by_loop, strict=True)))
    print("the last loss of fit is that of the loop by hand:", abs(by_fit - by_hand[-1]) < 1e-4)


if __name__ == "__main__":
    main()
