# why: the queue is a plain attribute and stays on the CPU; writing keys into its slice is a copy, but the product
#      with CUDA queries is refused.
# twin: memory_bank.py
# steps: 4
# expect: mixed-devices error at here
# expect: copy to the host at enqueue, times 4

import copy

import torch
import torch.nn.functional as F
from torch import nn


class MoCo(nn.Module):
    def __init__(self, width=8, size=32, momentum=0.99):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, width))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.size, self.momentum, self.at = size, momentum, 0
        self.queue = F.normalize(torch.randn(width, size), dim=0)

    @torch.no_grad()
    def follow(self):
        for k, q in zip(self.key.parameters(), self.query.parameters()):
            k.lerp_(q, 1 - self.momentum)

    def forward(self, a, b):
        q = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            self.follow()
            k = F.normalize(self.key(b), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        negative = q @ self.queue.clone()  # <- here
        self.queue[:, self.at : self.at + len(k)] = k.T  # <- enqueue
        self.at = (self.at + len(k)) % self.size
        return torch.cat([positive, negative], dim=1) / 0.07


def main(device):
    model = MoCo().to(device)
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.03, momentum=0.9)
    for _ in range(4):
        x = torch.randn(8, 12, device=device)
        logits = model(x, x + 0.1 * torch.randn_like(x))
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())


if __name__ == "__main__":
    main(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
