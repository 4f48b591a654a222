"""ResNet-50 as in its paper: fp32, SGD with momentum, a step of the learning rate."""

import argparse

import torch
from models.resnet import resnet50
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
model = resnet50().to(device)
criterion = nn.CrossEntropyLoss().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
images, labels = torch.randn(args.batch, 3, 224, 224), torch.randint(0, 1000, (args.batch,))

model.train()
for step in range(args.steps):
    x, y = images.to(device), labels.to(device)
    output = model(x)
    loss = criterion(output, y)
    correct = (output.argmax(1) == y).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(f"step {step}: loss {loss.item():.4f}, {correct.item()} of {args.batch}")
