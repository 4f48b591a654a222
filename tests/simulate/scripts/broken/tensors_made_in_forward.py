# why: the mask, the positions and the prompt are made on the CPU; masked_fill, the embedding and torch.cat refuse
#      them.
# twin: gpt_tied_generate.py
# steps: 4
# expect: mixed-devices error at mask
# expect: mixed-devices error at positions
# expect: mixed-devices error at append

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

vocab, context, width, heads = 32, 16, 32, 4
device = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, heads, c // heads).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(c // heads)
        mask = torch.ones(t, t, dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf"))  # <- mask
        return self.out((F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(b, t, c))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.attention, self.norm = Attention(), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        positions = torch.arange(ids.size(1))
        x = self.tokens(ids) + self.positions(positions)  # <- positions
        return self.head(self.norm(x + self.attention(x)))

    @torch.no_grad()
    def generate(self, ids, n):
        for _ in range(n):
            logits = self(ids[:, -context:])[:, -1]
            ids = torch.cat([ids, torch.multinomial(F.softmax(logits, -1), 1)], dim=1)  # <- append
        return ids


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.randint(vocab, (512,))
for _ in range(4):
    starts = torch.randint(len(text) - context - 1, (8,))
    batch = torch.stack([text[i : i + context + 1] for i in starts]).to(device)
    loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(model.generate(torch.zeros(1, 1, dtype=torch.long), 8).tolist())
