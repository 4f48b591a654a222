# style: three tasks, weights on the CPU used one by one: each is a CPU scalar, which PyTorch allows
# steps: 4
# expect: nothing

import torch
from torch import nn


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.heads = nn.ModuleDict({"age": nn.Linear(32, 1), "kind": nn.Linear(32, 4), "rain": nn.Linear(32, 1)})

    def forward(self, x):
        h = self.shared(x)
        return {name: head(h) for name, head in self.heads.items()}


def losses(out, batch):
    return [
        nn.functional.mse_loss(out["age"].squeeze(1), batch["age"]),
        nn.functional.cross_entropy(out["kind"], batch["kind"]),
        nn.functional.binary_cross_entropy_with_logits(out["rain"].squeeze(1), batch["rain"]),
    ]


def draw(n, device):
    x = torch.randn(n, 16)
    batch = {"x": x, "age": x.mean(1), "kind": x[:, :4].argmax(1), "rain": (x[:, 5] > 0).float()}
    return {name: value.to(device) for name, value in batch.items()}


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = torch.tensor([0.5, 1.0, 2.0])
    model = MultiHead().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        batch = draw(12, device)
        parts = losses(model(batch["x"]), batch)
        total = sum(weight * part for weight, part in zip(weights, parts))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    print({name: round(part.item(), 3) for name, part in zip(("age", "kind", "rain"), parts)})


main()
