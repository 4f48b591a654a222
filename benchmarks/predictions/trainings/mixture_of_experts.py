"""A GPT in which every other layer has eight experts, of which a token sees two: bf16, fused AdamW."""

import argparse

import torch
import torch.nn.functional as F
from models.gpt import Block
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
vocabulary, width, heads, layers, length = 32000, 512, 8, 8, 512
experts, chosen_each = 8, 2
capacity = int(1.25 * chosen_each * length / experts)  # places that an expert has for each text


class Experts(nn.Module):
    def __init__(self, hidden=4 * width):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.wide = nn.Parameter(0.02 * torch.randn(experts, width, hidden))
        self.narrow = nn.Parameter(0.02 * torch.randn(experts, hidden, width))

    def forward(self, x):
        shares = F.softmax(self.router(x).float(), dim=-1)
        weights, chosen = shares.topk(chosen_each, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)

        # first choices queue before second ones; who comes after the last place is left out
        asked = F.one_hot(chosen, experts)
        queue = asked.transpose(1, 2).flatten(1, 2).cumsum(dim=1).unflatten(1, (chosen_each, -1)).transpose(1, 2)
        place = ((queue - 1) * asked).sum(dim=-1)
        weights = weights * (place < capacity)
        seats = F.one_hot(place.clamp(max=capacity - 1), capacity)
        combine = torch.einsum("blk,blke,blkc->blec", weights, asked.float(), seats.float())
        dispatch = (combine > 0).type_as(x)

        inputs = torch.einsum("blec,blw->ebcw", dispatch, x).flatten(1, 2)
        outputs = torch.bmm(F.gelu(torch.bmm(inputs, self.wide)), self.narrow).unflatten(1, (len(x), capacity))
        balance = experts * (asked[:, :, 0].float().mean((0, 1)) * shares.mean((0, 1))).sum()
        return torch.einsum("blec,ebcw->blw", combine.type_as(x), outputs), balance


class SparseBlock(Block):
    def __init__(self):
        super().__init__(width, heads, dropout=0.0)
        self.mlp = Experts()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y, balance = self.mlp(self.norm2(x))
        return x + y, balance


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dense = nn.ModuleList(Block(width, heads, dropout=0.0) for _ in range(layers // 2))
        self.sparse = nn.ModuleList(SparseBlock() for _ in range(layers // 2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x, total = self.tokens(tokens) + self.places(places), 0.0
        for dense, sparse in zip(self.dense, self.sparse, strict=True):
            x, balance = sparse(dense(x))
            total = total + balance
        return self.head(self.norm(x)), total


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
texts = torch.randint(0, vocabulary, (args.batch, length + 1))

for step in range(args.steps):
    text = texts.to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        scores, balance = model(text[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()) + 0.01 * balance
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
