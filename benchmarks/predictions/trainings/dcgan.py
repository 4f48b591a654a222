"""DCGAN for images of 64x64 pixels: fp32, two networks, two optimizers."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
noise_size, width = 100, 64


def up(inputs, outputs, stride=2, padding=1):
    return [nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)]


def down(inputs, outputs):
    return [nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, inplace=True)]


generator = nn.Sequential(
    *up(noise_size, 8 * width, 1, 0),
    *up(8 * width, 4 * width),
    *up(4 * width, 2 * width),
    *up(2 * width, width),
    nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(device)
critic = nn.Sequential(
    nn.Conv2d(3, width, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    *down(width, 2 * width),
    *down(2 * width, 4 * width),
    *down(4 * width, 8 * width),
    nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False),
    nn.Flatten(0),
).to(device)
criterion = nn.BCEWithLogitsLoss()
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
images = torch.rand(args.batch, 3, 64, 64) * 2 - 1

for step in range(args.steps):
    real = images.to(device)
    ones, zeros = torch.ones(args.batch, device=device), torch.zeros(args.batch, device=device)

    critic.zero_grad()
    loss_real = criterion(critic(real), ones)
    loss_real.backward()
    fake = generator(torch.randn(args.batch, noise_size, 1, 1, device=device))
    loss_fake = criterion(critic(fake.detach()), zeros)
    loss_fake.backward()
    critic_optimizer.step()

    generator.zero_grad()
    loss_generator = criterion(critic(fake), ones)
    loss_generator.backward()
    generator_optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: critic {(loss_real + loss_fake).item():.4f}, generator {loss_generator.item():.4f}")
