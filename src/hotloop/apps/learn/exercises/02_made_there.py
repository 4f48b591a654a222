"""Keep this on the device.

A picture gets some noise in ten steps. Every step makes its noise on the CPU
and copies it, and brings the picture back. Make the tensors on `device`, so
that nothing is copied between CPU and device in the loop. `picture` must end
on the device, with its noise.
"""

import torch

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

picture = torch.zeros(3, 32, 32)
picture.to(device)
for step in range(10):
    noise = torch.randn(3, 32, 32).to(device) * 0.1
    picture = (picture.to(device) + noise).cpu()
print(f"the picture is on {picture.device}, its spread is {picture.std():.2f}")
