"""argparse, a main guard and functions; prints what `torch.cuda` says."""

import argparse

import torch
from torch import nn


def train(model, optimizer, batch, device):
    x = torch.randn(batch, 16, device=device)
    y = torch.randint(4, (batch,), device=device)
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    device = torch.device(args.device)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        loss = train(model, optimizer, args.batch, device)
        if step == 0:
            print("batch", args.batch, __name__, torch.cuda.get_device_name(0), torch.cuda.memory_allocated() > 0)
    print("never reached", loss)


if __name__ == "__main__":
    main()
