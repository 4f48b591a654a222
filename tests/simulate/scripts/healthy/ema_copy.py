# style: a moving average of the weights, copied by hand and evaluated
# steps: 5
# expect: nothing

import copy

import torch
from torch import nn


class EMA:
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.model = copy.deepcopy(model).eval()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for kept, new in zip(self.model.parameters(), model.parameters()):
            kept.mul_(self.decay).add_(new, alpha=1 - self.decay)


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    model.to(device)
    ema = EMA(model)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    x, y = torch.randn(40, 8).to(device), torch.randint(3, (40,)).to(device)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        ema.update(model)
    with torch.inference_mode():
        accuracy = (ema.model(x).argmax(1) == y).float().mean()
    print(f"accuracy of the average: {accuracy.item():.2f}")


main()
