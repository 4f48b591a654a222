"""Evaluating a model: eval mode, no gradients, and one wait for the device instead of one per batch."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import hotloop


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 3))


def make_loader() -> DataLoader:
    """1,000 made-up points in 3 classes, and 1,000 is not a multiple of 128: the last batch is short."""
    points = torch.randn(1000, 2, generator=torch.Generator().manual_seed(1))
    classes = (points.sum(1) > 0).long() + (points[:, 0] > 1).long()
    return DataLoader(TensorDataset(points, classes), batch_size=128)


def plain(model: nn.Module) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"--- Plain PyTorch, as first written (on {device}) ---")
    loader = make_loader()
    model.to(device)
    model.eval()  # Dropout off, BatchNorm frozen
    accuracies = []
    with torch.no_grad():  # nothing is kept for a backward pass
        for x, y in loader:
            correct = model(x.to(device)).argmax(1) == y.to(device)
            accuracies.append(correct.float().mean().item())  # .item() waits for the device: once per batch
    print(f"mean of the batch means: {sum(accuracies) / len(accuracies):.6f}   waits: {len(accuracies)}")
    print(f"  not quite right: the last batch has only {len(y)} items and counts as much as one of 128")

    print("\n--- Plain PyTorch, better ---")
    correct = torch.zeros((), device=device)
    with torch.inference_mode():  # like no_grad, and cheaper still
        for x, y in loader:
            correct += (model(x.to(device)).argmax(1) == y.to(device)).sum()  # stays on the device
    print(f"correct / items:         {correct.item() / len(loader.dataset):.6f}   waits: 1")
    model.train()  # and never forget this line


def is_correct(output: Tensor, target: Tensor) -> Tensor:
    """A metric is any function of output and target; it gives a value per item, or their mean."""
    return output.argmax(1) == target


def with_hotloop(model: nn.Module) -> None:
    print("\n--- With hotloop ---")
    metrics = {
        "accuracy": is_correct,
        # validate_args=False: its checks would look at the values, and so wait, in every batch
        "torchmetrics": MulticlassAccuracy(num_classes=3, average="micro", validate_args=False),
    }
    scores = hotloop.evaluate(model, make_loader(), metrics, loss=nn.CrossEntropyLoss())
    for name, value in scores.items():
        print(f"{name:12} {value:.6f}")
    print("back in training mode by itself:", model.training)

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loop = hotloop.Loop(model, optimizer, nn.CrossEntropyLoss())
    print(f"\n--- The same from a Loop (on {loop.device}) ---")
    for epoch in range(3):
        for batch in loop.batches(make_loader()):
            loop.step(batch)
        scores = loop.evaluate(make_loader(), {"accuracy": is_correct})
        print(f"epoch {epoch + 1}: accuracy {scores['accuracy']:.4f}, loss {scores['loss']:.4f}")


def main() -> None:
    model = make_model()
    plain(model)
    with_hotloop(model)


if __name__ == "__main__":
    main()
