# why: only the images are moved; nll_loss and == refuse a CPU target beside CUDA outputs.
# twin: digits_argparse.py
# steps: 6
# expect: mixed-devices error at loss, fix target.to(
# expect: mixed-devices error at accuracy

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 8, 3)
        self.fc = nn.Linear(8 * 5 * 5, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)


def train(model, device, loader, optimizer):
    model.train()
    for data, target in loader:
        data = data.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)  # <- loss
        loss.backward()
        optimizer.step()


def test(model, device, loader):
    model.eval()
    correct = torch.zeros((), dtype=torch.long, device=device)
    with torch.no_grad():
        for data, target in loader:
            data = data.to(device)
            correct += (model(data).argmax(dim=1) == target).sum()  # <- accuracy
    print(f"accuracy {correct.item() / len(loader.dataset):.2f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--no-cuda", action="store_true")
    args = parser.parse_args()
    use_cuda = not args.no_cuda and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    data = TensorDataset(torch.randn(48, 1, 14, 14), torch.randint(0, 10, (48,)))
    model = Net().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for _ in range(args.epochs):
        train(model, device, DataLoader(data, batch_size=args.batch_size, shuffle=True), optimizer)
        test(model, device, DataLoader(data, batch_size=args.batch_size))


if __name__ == "__main__":
    main()
