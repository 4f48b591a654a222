"""A small GPT with tied weights, fused attention, bf16, EMA by deepcopy, generation, and a saved checkpoint."""

import copy
import sys

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (s.view(b, t, self.heads, -1).transpose(1, 2) for s in self.qkv(self.ln1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, context, width, heads, layers):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens, targets=None):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


SIZES = {"tiny": (100, 32, 32, 4, 2), "small": (50304, 1024, 768, 12, 2)}  # GPT-2 has 12 layers, all alike
size = sys.argv[1] if len(sys.argv) > 1 else "tiny"
vocabulary, context, *_ = SIZES[size]
model = GPT(*SIZES[size]).to("cuda")
assert model.head.weight is model.wte.weight
model = torch.compile(model)
ema = copy.deepcopy(model).eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
data = torch.randint(vocabulary, (4 * context,))
best = 1e9
for step in range(10):
    starts = torch.randint(len(data) - context, (4,)).tolist()
    x = torch.stack([data[i : i + context] for i in starts]).pin_memory().to("cuda", non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for average, parameter in zip(ema.parameters(), model.parameters()):
            average.mul_(0.999).add_(parameter, alpha=0.001)
    if loss.item() < best:
        best = loss.item()
        torch.save({"model": model.state_dict(), "best": best}, "best.pt")
    if size == "tiny" and step == 1:
        model.load_state_dict(torch.load("best.pt", map_location="cuda")["model"])
        tokens = x[:1, :4]
        for _ in range(3):
            probabilities = F.softmax(model(tokens)[:, -1], dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], dim=1)
        print("generated", tokens.tolist()[0][:2], tokens.shape)
