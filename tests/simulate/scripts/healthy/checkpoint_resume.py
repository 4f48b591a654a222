# style: checkpoints into a temporary folder, then resuming from the last one on the CPU side
# steps: 6
# expect: nothing

import tempfile
from pathlib import Path

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def fresh():
    model = nn.Linear(10, 4).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return model, optimizer, torch.zeros(4, device=device)


def train(model, optimizer, centre, steps):
    for _ in range(steps):
        x = torch.randn(8, 10).to(device)
        out = model(x)
        loss = (out - centre).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        centre = 0.9 * centre + 0.1 * out.detach().mean(0)
    return centre


def save(path, model, optimizer, centre):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "centre": centre, "epoch": 0}
    torch.save(state, path)


def resume(path):
    model, optimizer, _ = fresh()
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer, state["centre"].to(device)


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "last.pt"
    model, optimizer, centre = fresh()
    centre = train(model, optimizer, centre, 3)
    save(path, model, optimizer, centre)
    model, optimizer, centre = resume(path)
    train(model, optimizer, centre, 3)
    print("resumed from", path.name)
