"""A convolutional VAE for images of 64x64 pixels: fp32, Adam."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=512)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"


class VAE(nn.Module):
    def __init__(self, latent=128):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.LeakyReLU(),
            nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.LeakyReLU(),
            nn.Conv2d(64, 128, 3, 2, 1), nn.BatchNorm2d(128), nn.LeakyReLU(),
            nn.Conv2d(128, 256, 3, 2, 1), nn.BatchNorm2d(256), nn.LeakyReLU(),
            nn.Flatten(),
        )  # fmt: skip
        self.mean, self.log_variance = nn.Linear(256 * 16, latent), nn.Linear(256 * 16, latent)
        self.decode = nn.Linear(latent, 256 * 16)
        self.decoder = nn.Sequential(
            nn.Unflatten(1, (256, 4, 4)),
            nn.ConvTranspose2d(256, 128, 3, 2, 1, 1), nn.BatchNorm2d(128), nn.LeakyReLU(),
            nn.ConvTranspose2d(128, 64, 3, 2, 1, 1), nn.BatchNorm2d(64), nn.LeakyReLU(),
            nn.ConvTranspose2d(64, 32, 3, 2, 1, 1), nn.BatchNorm2d(32), nn.LeakyReLU(),
            nn.ConvTranspose2d(32, 32, 3, 2, 1, 1), nn.BatchNorm2d(32), nn.LeakyReLU(),
            nn.Conv2d(32, 3, 3, padding=1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, x):
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(self.decode(z)), mean, log_variance


model = VAE().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
images = torch.rand(args.batch, 3, 64, 64)

total = 0.0
for step in range(args.steps):
    x = images.to(device)
    optimizer.zero_grad()
    made, mean, log_variance = model(x)
    divergence = -0.5 * torch.mean(torch.sum(1 + log_variance - mean**2 - log_variance.exp(), dim=1))
    loss = F.mse_loss(made, x) + 0.00025 * divergence
    loss.backward()
    total += loss.item()
    optimizer.step()
print(f"mean loss {total / args.steps:.4f}")
