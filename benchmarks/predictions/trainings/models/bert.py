"""BERT: post-norm encoder with an attention mask, and the head that guesses masked words."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (f(x).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout.p if self.training else 0.0)
        y = self.out(y.transpose(1, 2).reshape(batch, length, width))
        x = self.norm1(x + self.dropout(y))
        return self.norm2(x + self.dropout(self.narrow(F.gelu(self.wide(x)))))


class BERT(nn.Module):
    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 30522, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.places = nn.Embedding(512, width)
        self.kinds = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, vocabulary))
        self.head[-1].weight = self.words.weight

    def forward(self, words: Tensor, attention: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.words(words) + self.places(places) + self.kinds(torch.zeros_like(words))
        x = self.dropout(self.norm(x))
        mask = attention[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)
