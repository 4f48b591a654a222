# style: Siamese encoders with a contrastive loss; the temperature is a CPU scalar, which PyTorch allows
# steps: 4
# expect: nothing

import torch
import torch.nn.functional as F
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TEMPERATURE = torch.tensor(0.2)


def augment(x):
    return x + 0.1 * torch.randn_like(x)


def nt_xent(a, b):
    z = F.normalize(torch.cat([a, b]), dim=1)
    n = len(a)
    similarity = z @ z.T / TEMPERATURE
    itself = torch.eye(2 * n, dtype=torch.bool, device=z.device)
    similarity = similarity.masked_fill(itself, -1e9)
    partner = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(similarity, partner)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 32), nn.ReLU())
        self.project = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return self.project(self.trunk(x))


encoder = Encoder().to(device)
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
for x in torch.randn(48, 20).chunk(4):
    x = x.to(device)
    loss = nt_xent(encoder(augment(x)), encoder(augment(x)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
