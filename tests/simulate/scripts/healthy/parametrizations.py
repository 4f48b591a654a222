# style: parametrized weights: spectral norm, weight norm, and a pruning mask of one's own
# steps: 4
# expect: nothing

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize


class Pruned(nn.Module):
    def __init__(self, shape, keep=0.5):
        super().__init__()
        self.register_buffer("mask", (torch.rand(shape) < keep).float())

    def forward(self, weight):
        return weight * self.mask


def build():
    first = parametrizations.spectral_norm(nn.Linear(10, 20))
    second = parametrizations.weight_norm(nn.Linear(20, 20))
    third = nn.Linear(20, 3)
    parametrize.register_parametrization(third, "weight", Pruned(third.weight.shape))
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = build().to(device)
optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(0)
for _ in range(4):
    x = torch.randn(16, 10, generator=generator).to(device)
    loss = nn.functional.multi_margin_loss(model(x), x[:, :3].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

parametrize.remove_parametrizations(model[4], "weight")
print("zero weights:", (model[4].weight == 0).sum().item())
