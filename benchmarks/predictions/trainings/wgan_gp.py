"""WGAN with a penalty on the critic's gradient, two critic updates for each of the generator, at 64x64: fp32, Adam."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
noise_size, width = 128, 64
critic_updates, penalty_weight = 2, 10.0


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(noise_size, 8 * width * 4 * 4)
        layers = [nn.BatchNorm2d(8 * width), nn.ReLU(inplace=True)]
        for inputs, outputs in ((8, 4), (4, 2), (2, 1)):
            layers += [
                nn.ConvTranspose2d(inputs * width, outputs * width, 4, 2, 1, bias=False),
                nn.BatchNorm2d(outputs * width),
                nn.ReLU(inplace=True),
            ]
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh())

    def forward(self, noise):
        return self.layers(self.start(noise).view(-1, 8 * width, 4, 4))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        layers = []
        for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width), (4 * width, 8 * width)):
            layers += [nn.Conv2d(inputs, outputs, 5, 2, 2), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * width * 4 * 4, 1))

    def forward(self, x):
        return self.layers(x).squeeze(1)


def gradient_penalty(critic, real, fake):
    share = torch.rand(len(real), 1, 1, 1, device=real.device)
    mixed = (share * real + (1 - share) * fake).requires_grad_(True)
    scores = critic(mixed)
    (gradients,) = torch.autograd.grad(
        outputs=scores, inputs=mixed, grad_outputs=torch.ones_like(scores), create_graph=True, retain_graph=True
    )
    return ((gradients.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


generator, critic = Generator().to(device), Critic().to(device)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9))
images = torch.rand(critic_updates, args.batch, 3, 64, 64) * 2 - 1

for step in range(args.steps):
    for update in range(critic_updates):
        real = images[update].to(device)
        fake = generator(torch.randn(args.batch, noise_size, device=device)).detach()
        distance = critic(fake).mean() - critic(real).mean()
        critic_loss = distance + penalty_weight * gradient_penalty(critic, real, fake)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()

    fake = generator(torch.randn(args.batch, noise_size, device=device))
    generator_loss = -critic(fake).mean()
    generator_optimizer.zero_grad()
    generator_loss.backward()
    generator_optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: critic {critic_loss.item():.4f}, generator {generator_loss.item():.4f}")
