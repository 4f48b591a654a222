"""A classifier of small images as tutorials write it, with some faults: what `hotloop doctor` is shown with."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 6400

    def __getitem__(self, index):
        time.sleep(0.0005)  # reading and decoding a file
        return torch.full((3, 16, 16), index / 6400), index % 10


def evaluate(model, loader):
    model.eval()
    correct = 0
    for images, labels in loader:
        correct += (model(images).argmax(1) == labels).sum().item()
    model.train()
    return correct / len(loader.dataset)


torch.autograd.set_detect_anomaly(True)
features = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU())
model = nn.Sequential(features, nn.Flatten(), nn.Linear(4608, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()
loader = DataLoader(Images(), batch_size=64, shuffle=True)
for epoch in range(3):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
    print(epoch, evaluate(model, loader))
