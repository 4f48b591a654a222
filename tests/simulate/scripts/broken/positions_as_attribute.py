# why: a plain attribute is not moved by Module.to; only parameters and buffers are.
# twin: transformer_encoder.py
# steps: 4
# expect: mixed-devices error at here, fix register_buffer

import math

import torch
from torch import nn


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=64):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        rate = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2] = torch.sin(position * rate)
        pe[:, 1::2] = torch.cos(position * rate)
        self.pe = pe

    def forward(self, x):
        return x + self.pe[: x.size(1)]  # <- here


class Tagger(nn.Module):
    def __init__(self, vocab=50, d_model=32, tags=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, d_model, padding_idx=0)
        self.position = PositionalEncoding(d_model)
        layer = nn.TransformerEncoderLayer(d_model, nhead=4, dim_feedforward=64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.out = nn.Linear(d_model, tags)

    def forward(self, ids):
        x = self.position(self.embed(ids))
        return self.out(self.encoder(x, src_key_padding_mask=ids == 0))


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Tagger().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_fn = nn.CrossEntropyLoss(ignore_index=0)
    for _ in range(4):
        ids = torch.randint(1, 50, (8, 10)).to(device)
        ids[:, 8:] = 0
        tags = ids % 6
        optimizer.zero_grad()
        loss = loss_fn(model(ids).flatten(0, 1), tags.flatten())
        loss.backward()
        optimizer.step()
    print(f"{loss.item():.3f}")


if __name__ == "__main__":
    main()
