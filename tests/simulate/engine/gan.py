"""Two optimizers in turns, as the tutorials write them."""

import torch
from torch import nn

device = "cuda"
G = nn.Sequential(nn.ConvTranspose2d(8, 4, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 3, 5), nn.Tanh())
D = nn.Sequential(nn.Conv2d(3, 4, 4), nn.LeakyReLU(0.2), nn.Conv2d(4, 1, 5))
G, D = G.to(device), D.to(device)
optD = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
optG = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
for i in range(20):
    real = torch.randn(6, 3, 8, 8).to(device)
    ones, zeros = torch.ones(6, 1, 1, 1, device=device), torch.zeros(6, 1, 1, 1, device=device)
    fake = G(torch.randn(6, 8, 1, 1, device=device))
    optD.zero_grad()
    (criterion(D(real), ones) + criterion(D(fake.detach()), zeros)).backward()
    optD.step()
    optG.zero_grad()
    criterion(D(fake), ones).backward()
    optG.step()
    print("round", i)
