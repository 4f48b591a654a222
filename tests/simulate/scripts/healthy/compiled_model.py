# style: torch.compile where there is a GPU, a fused optimizer, TF32 allowed
# steps: 5
# expect: nothing
# expect: note compile

import torch
from torch import nn

torch.set_float32_matmul_precision("high")
device = "cuda" if torch.cuda.is_available() else "cpu"


class Mixer(nn.Module):
    def __init__(self, tokens=8, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.tokens = nn.Linear(tokens, tokens)
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(x)


model = nn.Sequential(Mixer(), Mixer(), nn.Flatten(), nn.Linear(128, 2)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device == "cuda")
train_model = torch.compile(model) if device == "cuda" else model

for step in range(5):
    x = torch.randn(8, 8, 16, device=device)
    y = (x.mean((1, 2)) > 0).long()
    loss = nn.functional.cross_entropy(train_model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print(loss.item(), sum(p.numel() for p in model.parameters()))
