# style: fp16 autocast with GradScaler, unscale and clip; the scaler itself waits once per step
# steps: 5
# expect: nothing
# expect: sync item at scaler, times 5
# expect: no sync at backward

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast

device = "cuda" if torch.cuda.is_available() else "cpu"
half = device == "cuda"


class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.gate = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


model = nn.Sequential(Gated(16), Gated(16), nn.Linear(16, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = GradScaler(device, enabled=half)
data = torch.randn(40, 16, device=device)
goal = data.sum(1, keepdim=True)

for x, y in zip(data.split(8), goal.split(8)):
    optimizer.zero_grad(set_to_none=True)
    with autocast(device, dtype=torch.float16, enabled=half):
        loss = F.smooth_l1_loss(model(x), y)
    scaler.scale(loss).backward()  # <- backward
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    scaler.step(optimizer)  # <- scaler
    scaler.update()

assert scaler.get_scale() == (65536.0 if half else 1.0)
print("scale", scaler.get_scale(), "loss", loss.item())
