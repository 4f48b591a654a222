"""nn.Transformer that translates, with its masks: fp32, Adam, a DataLoader."""

import argparse

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

device = "cuda"
vocabulary, width, length = 32000, 512, 128


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        at, rates = torch.arange(length)[:, None], torch.exp(-math.log(10000) * torch.arange(0, width, 2) / width)
        places = torch.zeros(length, width)
        places[:, 0::2], places[:, 1::2] = torch.sin(at * rates), torch.cos(at * rates)
        self.register_buffer("places", places)
        self.transformer = nn.Transformer(width, 8, 6, 6, 2048, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def embed(self, words):
        return self.words(words) * math.sqrt(width) + self.places[: words.shape[1]]

    def forward(self, source, target):
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=source.device)
        padding = source == 0
        hidden = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.head(hidden)


model = Translator().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
sentences = TensorDataset(*(torch.randint(1, vocabulary, (args.batch * args.steps, n)) for n in (length, length + 1)))
loader = DataLoader(sentences, batch_size=args.batch, shuffle=True)

for step, (source, target) in enumerate(loader):
    source, target = source.to(device), target.to(device)
    scores = model(source, target[:, :-1])
    loss = criterion(scores.reshape(-1, vocabulary), target[:, 1:].reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
