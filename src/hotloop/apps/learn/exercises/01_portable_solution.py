"""Make this script portable.

It runs only where there is an NVIDIA GPU. Change it so that it uses the GPU
where there is one, and the CPU where there is none, without anybody having to
edit it.
"""

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

model = nn.Linear(4, 2).to(device)
batch = torch.rand(8, 4).to(device)
output = model(batch)
print(f"the output is on {output.device}")
