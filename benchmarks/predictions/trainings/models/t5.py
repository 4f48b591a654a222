"""A T5-like encoder and decoder: the distance of two words is a bias that is added to the scores of attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Scores by hand, as T5 does, since the bias has to be added to them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        k, v = (f(memory).view(batch, memory.shape[1], self.heads, -1).transpose(1, 2) for f in (self.key, self.value))
        scores = q @ k.transpose(2, 3)
        if bias is not None:
            scores = scores + bias
        weights = F.dropout(F.softmax(scores.float(), dim=-1).type_as(scores), 0.1, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Feed(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.dropout(F.relu(self.wide(x)), 0.1, self.training))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, *, decoder: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3 if decoder else 2))
        self.own = Attention(width, heads)
        self.across = Attention(width, heads) if decoder else None
        self.feed = Feed(width, hidden)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norms[0](x)
        x = x + F.dropout(self.own(y, y, bias), 0.1, self.training)
        if self.across is not None:
            x = x + F.dropout(self.across(self.norms[1](x), memory, None), 0.1, self.training)
        return x + F.dropout(self.feed(self.norms[-1](x)), 0.1, self.training)


class Stack(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, hidden: int, *, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.distances = nn.Embedding(32, heads)
        self.layers = nn.ModuleList(Layer(width, heads, hidden, decoder=decoder) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def bias(self, length: int, device: torch.device) -> Tensor:
        at = torch.arange(length, device=device)
        apart = (at[None, :] - at[:, None]).clamp(-16, 15) + 16
        bias = self.distances(apart).permute(2, 0, 1)
        if self.decoder:
            later = torch.triu(torch.ones(length, length, dtype=torch.bool, device=device), diagonal=1)
            bias = bias.masked_fill(later, float("-inf"))
        return bias

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        bias = self.bias(x.shape[1], x.device)
        for layer in self.layers:
            x = layer(x, bias, memory)
        return self.norm(x)


class T5(nn.Module):
    def __init__(
        self, layers: int = 8, width: int = 768, heads: int = 12, hidden: int = 2048, vocabulary: int = 32128
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.encoder = Stack(layers, width, heads, hidden, decoder=False)
        self.decoder = Stack(layers, width, heads, hidden, decoder=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.encoder(self.words(source))
        return self.head(self.decoder(self.words(target), memory))
