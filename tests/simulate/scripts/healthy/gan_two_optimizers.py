# style: a GAN, two optimizers, no functions
# steps: 4
# updates: 8
# expect: nothing
# expect: no copy to the device at noise

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
latent = 16

netG = nn.Sequential(
    nn.ConvTranspose2d(latent, 16, 4, 1, 0, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(True),
    nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(device)
netD = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 1, 4, 1, 0, bias=False),
    nn.Flatten(0),
).to(device)

criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
loader = DataLoader(TensorDataset(torch.rand(32, 1, 8, 8) * 2 - 1), batch_size=8, shuffle=True)

for i, (real,) in enumerate(loader):
    real = real.to(device)
    b = real.size(0)

    netD.zero_grad()
    ones = torch.ones(b, device=device)
    loss_real = criterion(netD(real), ones)
    loss_real.backward()
    noise = torch.randn(b, latent, 1, 1, device=device)  # <- noise
    fake = netG(noise)
    loss_fake = criterion(netD(fake.detach()), torch.zeros(b, device=device))
    loss_fake.backward()
    optimizerD.step()

    netG.zero_grad()
    loss_g = criterion(netD(fake), ones)
    loss_g.backward()
    optimizerG.step()

print("D", (loss_real + loss_fake).item(), "G", loss_g.item())
