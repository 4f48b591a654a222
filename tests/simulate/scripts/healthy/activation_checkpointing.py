# style: activation checkpointing of every block, Llama-like layers with grouped heads
# steps: 3
# expect: nothing

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width=32, heads=4, groups=2):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, width))

    def forward(self, x):
        b, t, _ = x.shape
        h = self.norm1(x)
        q = self.q(h).view(b, t, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(h).view(b, t, 2 * self.groups, self.size).transpose(1, 2).chunk(2, dim=1)
        repeat = self.heads // self.groups
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
        return x + self.mlp(self.norm2(x))


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
embed, head = nn.Embedding(50, 32).to(device), nn.Linear(32, 50).to(device)
blocks = nn.ModuleList(Block() for _ in range(3)).to(device)
parameters = [*embed.parameters(), *blocks.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-3)
for _ in range(3):
    ids = torch.randint(50, (4, 12), device=device)
    x = embed(ids)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False)
    loss = F.cross_entropy(head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.3f}")
