# style: the whole model saved as one file on another machine, loaded and trained on
# steps: 4
# expect: nothing

import os
import tempfile

import torch
import torch.nn as nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
folder = tempfile.mkdtemp()
filename = os.path.join(folder, "pretrained.pth")


def pretrain():
    """Stands for what somebody else did: the file holds CPU weights."""
    torch.save(nn.Sequential(nn.Linear(7, 14), nn.Softplus(), nn.Linear(14, 1)), filename)


def finetune():
    model = torch.load(filename, map_location=device, weights_only=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(4):
        x = torch.randn(9, 7, device=device)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


pretrain()
print("loss", finetune().item())
os.remove(filename)
os.rmdir(folder)
