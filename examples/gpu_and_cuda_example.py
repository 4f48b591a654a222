"""The whole story in one file: find the device, move, train, evaluate, time, and look at the memory."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.text import duration, size

EPOCHS = 3


def make_sprites(items: int, seed: int) -> TensorDataset:
    """Made-up pictures of 16 x 16 pixels: a horizontal or a vertical line in noise. Which is it?"""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(items, 1, 16, 16, generator=generator) * 0.7
    labels = torch.randint(2, (items,), generator=generator)
    where = torch.randint(16, (items,), generator=generator)
    for image, label, i in zip(images, labels, where, strict=True):
        line = image[0, i, :] if label == 0 else image[0, :, i]
        line += 0.5
    return TensorDataset(images, labels)


def make_loaders() -> tuple[DataLoader, DataLoader]:
    shuffled = torch.Generator().manual_seed(3)
    train = DataLoader(make_sprites(800, seed=1), batch_size=64, shuffle=True, generator=shuffled)
    return train, DataLoader(make_sprites(200, seed=2), batch_size=64)


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(128, 2)
    )
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def plain() -> None:
    print("--- Plain PyTorch ---")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("device:", device)
    train, test = make_loaders()
    model, optimizer = make_model()
    model.to(device)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(EPOCHS):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            criterion(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        model.eval()
        correct = torch.zeros((), device=device)
        with torch.inference_mode():
            for x, y in test:
                correct += (model(x.to(device)).argmax(1) == y.to(device)).sum()
        print(f"epoch {epoch + 1}: accuracy {correct.item() / len(test.dataset):.3f}")


def is_correct(output: Tensor, target: Tensor) -> Tensor:
    return output.argmax(1) == target


def with_hotloop() -> None:
    print("\n--- With hotloop ---")
    choice = hotloop.pick()
    print(f"1. device: {choice.device}. {choice.reason}")

    train, test = make_loaders()
    model, optimizer = make_model()
    hotloop.place(model, choice.device, optimizer)  # Loop does this too; here to show the piece alone
    print("2. the model is on", next(model.parameters()).device)

    loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss())
    report = loop.fit(train, epochs=EPOCHS, validate=test, metrics={"accuracy": is_correct}, progress=False)
    print("3. training and evaluation:")
    for epoch in report.epochs:
        print(f"   epoch {epoch.number}: loss {epoch.loss:.3f}, accuracy {epoch.metrics['accuracy']:.3f}")

    batch = hotloop.move(next(iter(train)), loop.device)
    step = hotloop.measure(lambda: loop.step(batch), device=loop.device, repeats=10)
    print(f"4. timing: one step takes {duration(step.median)} ({duration(step.low)} to {duration(step.high)})")

    print("5. highest memory:", size(report.peak_memory), "(PyTorch counts it on a CUDA GPU only)")
    print(f"   {report.steps} steps in {duration(report.seconds)} on {report.device_name}")


def main() -> None:
    plain()
    with_hotloop()


if __name__ == "__main__":
    main()
