# why: a boolean index has a size that only the device knows, so the host waits for it.
# twin: hard_examples.py
# steps: 4
# expect: sync nonzero or mask indexing at pick, times 4

import torch
import torch.nn.functional as F
from torch import nn


def mined(logits, labels, floor=1.0):
    each = F.cross_entropy(logits, labels, reduction="none")
    hard = each[each > floor]  # <- pick
    return hard.sum() / max(len(hard), 1)


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(24, 6, device=device)
        loss = mined(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("hard loss", loss.item())


main()
