# why: randn of a shape knows no device, unlike randn_like; the sample at the end is not moved either.
# twin: vae.py
# steps: 4
# expect: mixed-devices error at noise
# expect: mixed-devices error at decode

import torch
import torch.nn.functional as F
from torch import nn, optim


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc_mu = nn.Linear(32, 4)
        self.fc_logvar = nn.Linear(32, 4)
        self.fc2 = nn.Linear(4, 32)
        self.fc3 = nn.Linear(32, 64)

    def encode(self, x):
        h = F.relu(self.fc1(x))
        return self.fc_mu(h), self.fc_logvar(h)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn(std.shape)
        return mu + eps * std  # <- noise

    def decode(self, z):
        return torch.sigmoid(self.fc3(F.relu(self.fc2(z))))  # <- decode

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon, x, mu, logvar):
    bce = F.binary_cross_entropy(recon, x.view(-1, 64), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = VAE().to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)
for batch in torch.rand(32, 1, 8, 8).split(8):
    batch = batch.to(device)
    optimizer.zero_grad()
    loss = loss_function(*[(out := model(batch))[0], batch, *out[1:]])
    loss.backward()
    optimizer.step()

with torch.no_grad():
    sample = model.decode(torch.randn(4, 4)).cpu()
print(loss.item() / 8, sample.view(4, 8, 8).numpy().shape)
