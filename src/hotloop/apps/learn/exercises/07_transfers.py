"""Make the copies of this loop run beside the computation.

Every batch is copied from pageable memory, and the CPU waits for each copy.
Change that, with all 8 batches still trained on. (To keep the whole data on
the device is right too.)
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = TensorDataset(torch.rand(256, 16), torch.randint(4, (256,)))
loader = DataLoader(data, batch_size=32)
model = nn.Linear(16, 4).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

steps = 0
for x, y in loader:
    x, y = x.to(device), y.to(device)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    steps += 1
print(f"{steps} steps")
